/* A GPU of Intel that is not there, for `scripts/chip-table`: a library for LD_PRELOAD that answers in place of the
   kernel's i915 driver, so that Mesa's ANV compiles for the device of PCI id NOOP_I915_ID. Its memory is a file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <drm/i915_drm.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xf86drm.h>

#define LOCAL(id) (((id) & 0xff00) == 0x5600) /* DG2 has memory of its own */
static uint64_t next_offset = 1 << 20;
static uint32_t next_handle = 1;
static uint64_t offsets[1 << 16];

static char *node(void) { /* at most 19 characters */
  static char path[20];
  if (!path[0]) snprintf(path, sizeof path, "/proc/self/fd/%d", memfd_create("i915", 0));
  return path;
}

static uint32_t id(void) { return strtoul(getenv("NOOP_I915_ID"), NULL, 16); }

static drmDevicePtr device(void) {
  static drmPciBusInfo bus = {.dev = 2};
  static drmPciDeviceInfo info = {.vendor_id = 0x8086};
  static char *nodes[DRM_NODE_MAX];
  info.device_id = id();
  nodes[DRM_NODE_PRIMARY] = nodes[DRM_NODE_RENDER] = node();
  drmDevicePtr one = calloc(1, sizeof *one);
  one->nodes = nodes;
  one->available_nodes = 1 << DRM_NODE_PRIMARY | 1 << DRM_NODE_RENDER;
  one->bustype = DRM_BUS_PCI;
  one->businfo.pci = &bus;
  one->deviceinfo.pci = &info;
  return one;
}
int drmGetDevices2(uint32_t flags, drmDevicePtr devices[], int most) {
  if (devices && most) devices[0] = device();
  return 1;
}
int drmGetDevice2(int fd, uint32_t flags, drmDevicePtr *out) { *out = device(); return 0; }
void drmFreeDevice(drmDevicePtr *one) { free(*one); *one = NULL; }
void drmFreeDevices(drmDevicePtr devices[], int n) { for (int i = 0; i < n; i++) drmFreeDevice(&devices[i]); }

static int create(uint64_t size, uint32_t *handle) {
  int file = open(node(), O_RDWR);
  *handle = next_handle++;
  offsets[*handle & 0xffff] = next_offset;
  next_offset += (size + 0xffff) & ~0xffffull;
  if (ftruncate(file, next_offset)) return -1;
  close(file);
  return 0;
}

static int answer(void *data, int32_t *length, const void *bytes, int32_t n) {
  if (*length) memcpy(data, bytes, n);
  *length = n;
  return 0;
}

static int query(struct drm_i915_query_item *item) {
  void *data = (void *)(uintptr_t)item->data_ptr;
  union { char bytes[1024]; struct drm_i915_query_topology_info topology; struct drm_i915_query_engine_info engines;
          struct drm_i915_query_memory_regions regions; } x = {0};
  int dg2 = LOCAL(id()), slices = dg2 ? 8 : 1, sub = dg2 ? 4 : 6, eus = 16;
  switch (item->query_id) {
  case DRM_I915_QUERY_TOPOLOGY_INFO:
  case DRM_I915_QUERY_GEOMETRY_SUBSLICES:
    x.topology.max_slices = slices; x.topology.max_subslices = sub; x.topology.max_eus_per_subslice = eus;
    x.topology.subslice_offset = 1; x.topology.subslice_stride = 1;
    x.topology.eu_offset = 1 + slices; x.topology.eu_stride = 2;
    x.topology.data[0] = (1 << slices) - 1;
    memset(x.topology.data + 1, (1 << sub) - 1, slices);
    memset(x.topology.data + 1 + slices, 0xff, 2 * slices * sub);
    return answer(data, &item->length, &x, sizeof x.topology + 1 + slices + 2 * slices * sub);
  case DRM_I915_QUERY_ENGINE_INFO:
    x.engines.num_engines = 2;
    x.engines.engines[1].engine.engine_class = I915_ENGINE_CLASS_COPY;
    return answer(data, &item->length, &x, sizeof x.engines + 2 * sizeof x.engines.engines[0]);
  case DRM_I915_QUERY_MEMORY_REGIONS:
    x.regions.num_regions = 1 + dg2;
    for (int i = 0; i < 1 + dg2; i++) {
      x.regions.regions[i].region.memory_class = i;
      x.regions.regions[i].probed_size = x.regions.regions[i].unallocated_size = 16ull << 30;
      x.regions.regions[i].probed_cpu_visible_size = x.regions.regions[i].unallocated_cpu_visible_size = 16ull << 30;
    }
    return answer(data, &item->length, &x, sizeof x.regions + (1 + dg2) * sizeof x.regions.regions[0]);
  }
  item->length = -EINVAL;
  return 0;
}

static int getparam(drm_i915_getparam_t *p) {
  switch (p->param) {
  case I915_PARAM_CHIPSET_ID: *p->value = id(); return 0;
  case I915_PARAM_REVISION: *p->value = LOCAL(id()) ? 8 : 1; return 0;
  case I915_PARAM_CS_TIMESTAMP_FREQUENCY: *p->value = 19200000; return 0;
  case I915_PARAM_HAS_ALIASING_PPGTT: *p->value = 3; return 0;
  case I915_PARAM_MMAP_VERSION: case I915_PARAM_MMAP_GTT_VERSION: *p->value = 4; return 0;
  case I915_PARAM_CMD_PARSER_VERSION: *p->value = 10; return 0;
  case I915_PARAM_SUBSLICE_TOTAL: *p->value = LOCAL(id()) ? 32 : 6; return 0;
  case I915_PARAM_EU_TOTAL: *p->value = LOCAL(id()) ? 512 : 96; return 0;
  default: *p->value = 1; return 0;
  }
}

int ioctl(int fd, unsigned long request, ...) {
  static int (*real)(int, unsigned long, void *);
  va_list list;
  va_start(list, request);
  void *arg = va_arg(list, void *);
  va_end(list);
  if (!real) real = (int (*)(int, unsigned long, void *))dlsym(RTLD_NEXT, "ioctl");
  if (_IOC_TYPE(request) != DRM_IOCTL_BASE) return real(fd, request, arg);
  switch (request) {
  case DRM_IOCTL_VERSION: {
    struct drm_version *v = arg;
    if (v->name) memcpy(v->name, "i915", v->name_len < 4 ? v->name_len : 4);
    v->version_major = 1; v->version_minor = 6; v->version_patchlevel = 0;
    v->name_len = 4; v->date_len = v->desc_len = 0;
    return 0;
  }
  case DRM_IOCTL_GET_CAP: ((struct drm_get_cap *)arg)->value = 1; return 0;
  case DRM_IOCTL_SYNCOBJ_CREATE: ((struct drm_syncobj_create *)arg)->handle = next_handle++; return 0;
  case DRM_IOCTL_I915_GETPARAM: return getparam(arg);
  case DRM_IOCTL_I915_QUERY: {
    struct drm_i915_query *q = arg;
    struct drm_i915_query_item *items = (void *)(uintptr_t)q->items_ptr;
    for (uint32_t i = 0; i < q->num_items; i++) query(items + i);
    return 0;
  }
  case DRM_IOCTL_I915_GEM_CREATE: { struct drm_i915_gem_create *c = arg; return create(c->size, &c->handle); }
  case DRM_IOCTL_I915_GEM_CREATE_EXT: { struct drm_i915_gem_create_ext *c = arg; return create(c->size, &c->handle); }
  case DRM_IOCTL_I915_GEM_USERPTR: { struct drm_i915_gem_userptr *c = arg; return create(c->user_size, &c->handle); }
  case DRM_IOCTL_I915_GEM_MMAP_OFFSET: {
    struct drm_i915_gem_mmap_offset *m = arg;
    m->offset = offsets[m->handle & 0xffff];
    return 0;
  }
  case DRM_IOCTL_I915_GEM_MMAP: {
    struct drm_i915_gem_mmap *m = arg;
    m->addr_ptr = (uintptr_t)mmap(NULL, m->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offsets[m->handle & 0xffff] + m->offset);
    return 0;
  }
  case DRM_IOCTL_I915_GEM_CONTEXT_CREATE: ((struct drm_i915_gem_context_create *)arg)->ctx_id = 1; return 0;
  case DRM_IOCTL_I915_GEM_CONTEXT_CREATE_EXT: ((struct drm_i915_gem_context_create_ext *)arg)->ctx_id = 1; return 0;
  case DRM_IOCTL_I915_GEM_VM_CREATE: ((struct drm_i915_gem_vm_control *)arg)->vm_id = 1; return 0;
  case DRM_IOCTL_I915_GEM_CONTEXT_GETPARAM: {
    struct drm_i915_gem_context_param *p = arg;
    p->value = p->param == I915_CONTEXT_PARAM_GTT_SIZE ? 1ull << 48 : 0;
    return 0;
  }
  case DRM_IOCTL_I915_GEM_GET_APERTURE:
    ((struct drm_i915_gem_get_aperture *)arg)->aper_size = ((struct drm_i915_gem_get_aperture *)arg)->aper_available_size = 1ull << 48;
    return 0;
  }
  return 0;
}

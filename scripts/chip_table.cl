/* OpenCL's built-in functions on NVIDIA, for `scripts/chip-table`: clang has no library of them for ptxas. */
#define __OPENCL_VERSION__ 200
typedef unsigned int uint; typedef unsigned short ushort; typedef unsigned char uchar; typedef unsigned long ulong;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));
#define OVERLOADED __attribute__((overloadable)) static inline
#define get_local_id(i) __nvvm_read_ptx_sreg_tid_x()
#define get_group_id(i) ((i) ? __nvvm_read_ptx_sreg_ctaid_y() : __nvvm_read_ptx_sreg_ctaid_x())
#define get_global_offset(i) 0u
#define get_num_groups(i) ((i) ? __nvvm_read_ptx_sreg_nctaid_y() : __nvvm_read_ptx_sreg_nctaid_x())
#define CLK_LOCAL_MEM_FENCE 1
#define CLK_GLOBAL_MEM_FENCE 2
#define barrier(x) __nvvm_bar_sync(0)
#define as_uint(x) __builtin_astype((x), uint)
#define as_int(x) __builtin_astype((x), int)
#define as_float(x) __builtin_astype((x), float)
#define rint(x) __builtin_rintf(x)
#define fabs(x) __builtin_fabsf(x)
#define sqrt(x) __builtin_sqrtf(x)
#define isnan(x) __builtin_isnan(x)
OVERLOADED float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
OVERLOADED float4 fma(float4 a, float4 b, float4 c) { return __builtin_elementwise_fma(a, b, c); }
OVERLOADED uint min(uint a, uint b) { return a < b ? a : b; }
OVERLOADED int min(int a, int b) { return a < b ? a : b; }
OVERLOADED float min(float a, float b) { return __builtin_fminf(a, b); }
OVERLOADED uint max(uint a, uint b) { return a > b ? a : b; }
OVERLOADED int max(int a, int b) { return a > b ? a : b; }
OVERLOADED float max(float a, float b) { return __builtin_fmaxf(a, b); }
OVERLOADED uint mul_hi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
static inline float vload_half(long i, const __private half* p) { return __builtin_load_halff(p + i); }
static inline void vstore_half(float x, long i, __private half* p) { __builtin_store_halff(x, p + i); }
OVERLOADED uint atomic_add(volatile __local uint* p, uint v) { return __scoped_atomic_fetch_add(p, v, 0, 2); }
OVERLOADED uint atomic_add(volatile __global uint* p, uint v) { return __scoped_atomic_fetch_add(p, v, 0, 1); }
OVERLOADED int atomic_add(volatile __local int* p, int v) { return __scoped_atomic_fetch_add(p, v, 0, 2); }
OVERLOADED int atomic_add(volatile __global int* p, int v) { return __scoped_atomic_fetch_add(p, v, 0, 1); }
#define atomic_inc(p) atomic_add(p, 1u)

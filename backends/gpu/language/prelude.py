"""Prelude of every GPU kernel: macros that unify OpenCL C and GLSL, and math functions.

Exponential and logarithm are Cephes' single precision polynomials (Moshier); so are sine and
cosine, after a reduction in three steps. Explicit multiply-adds make their bits independent of the
device's library."""

CL = r"""
#pragma OPENCL FP_CONTRACT OFF
typedef uint2 uvec2;
#define FN static inline
#define PRECISE
#define UNROLL __attribute__((opencl_unroll_hint))
#define ROLLED __attribute__((opencl_unroll_hint(1)))
#define LID ((uint)get_local_id(0))
#define GX ((uint)(get_global_offset(0) / WG + get_group_id(0)))
#define GY ((uint)(get_global_offset(1) + get_group_id(1)))
#define NGX ((uint)get_num_groups(0))
#define UINT(x) ((uint)(x))
#define INT(x) ((int)(x))
#define FLOAT(x) ((float)(x))
#define UVEC2(a, b) ((uint2)(a, b))
#define F2U(x) as_uint((float)(x))
#define U2F(x) as_float((uint)(x))
#define U2I(x) as_int((uint)(x))
#define FMA(a, b, c) fma(a, b, c)
#define RINT(x) rint(x)
#define FABS(x) fabs(x)
#define LOAD16(b, i) ((uint)(b)[i])
#define LOAD8(b, i) ((uint)(b)[i])
#define STORE16(b, i, v) (b)[i] = (ushort)(v)
#define STORE8(b, i, v) (b)[i] = (uchar)(v)
#define MULHI(a, b) mul_hi((uint)(a), (uint)(b))
FN float F16(uint bits) { ushort h = (ushort)bits; return vload_half(0, (const __private half*)&h); }
FN uint TO_F16(float x) { ushort h; vstore_half(x, 0, (__private half*)&h); return (uint)h; }
"""

# Rendered for numbers, and for lanes where these are vectors (F, I: the types; L: what the names
# begin with). Without branches: 0 and infinity come of the scaling at the end.
SMOOTH = r"""
FN F_ L_EXP(F_ x) {
  x = x < SPLAT_(-105.0f) ? SPLAT_(-105.0f) : x;
  x = x > SPLAT_(89.5f) ? SPLAT_(89.5f) : x;
  PRECISE F_ n = RINT(x * 1.44269504f);
  PRECISE F_ r = FMA(n, SPLAT_(2.12194440e-4f), FMA(n, SPLAT_(-0.693359375f), x));
  PRECISE F_ p = SPLAT_(1.9875691500e-4f);
  p = FMA(p, r, SPLAT_(1.3981999507e-3f));
  p = FMA(p, r, SPLAT_(8.3334519073e-3f));
  p = FMA(p, r, SPLAT_(4.1665795894e-2f));
  p = FMA(p, r, SPLAT_(1.6666665459e-1f));
  p = FMA(p, r, SPLAT_(5.0000001201e-1f));
  p = FMA(p, r, SPLAT_(1.0f)); /* not an addition after the last one: a driver may add in another order */
  p = FMA(p, r, SPLAT_(1.0f));
  I_ k = TO_I_(n), half_k = k >> 1;
  p = p * POWER_(half_k);
  p = p * POWER_(k - half_k);
  return p;
}
FN F_ L_TANH(F_ x) {
  F_ a = FABS(x);
  PRECISE F_ cube = a * a * a;
  PRECISE F_ e = L_EXP(2.0f * a) + 1.0f;
  PRECISE F_ far = 1.0f - 2.0f / e;
  F_ t = a < SPLAT_(0.02f) ? FMA(cube, SPLAT_(-0.33333333f), a) : far;
  return x < SPLAT_(0.0f) ? -t : t;
}
FN F_ L_SILU(F_ x) {
  PRECISE F_ e = L_EXP(-x) + 1.0f;
  PRECISE F_ y = 1.0f / e;
  y = x * y;
  return y;
}
FN F_ L_GELU(F_ x) {
  PRECISE F_ cube = x * x * x;
  PRECISE F_ y = 0.044715f * cube;
  y = 0.7978845608f * (x + y);
  y = 1.0f + L_TANH(y);
  y = 0.5f * x * y;
  return y;
}
"""


def _smooth(names: dict[str, str]) -> str:
    text = SMOOTH
    for name, meaning in names.items():
        text = text.replace(f"{name}_", meaning)
    return text


NUMBERS = _smooth({"F": "float", "TO_I": "INT", "I": "int", "SPLAT": "", "POWER": "POWER2", "L": ""})
VECTORS = _smooth(
    {"F": "float16", "TO_I": "convert_int16", "I": "int16", "SPLAT": "(float16)", "POWER": "LPOWER2", "L": "L"}
)

CL_SIMT = r"""
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define DEVICE_BARRIER() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#define ATOMIC_ADD(x, v) atomic_add(&(x), v)
#define ATOMIC_TAKE(x) atomic_inc(&(x))
#define FOR_EACH(i, n) for (uint i = GX * WG + LID; i < (n); i += NGX * WG)
#define AHEAD(b, i)
#define LANE (LID % 16u)
#define LCLAMP(i, n) (min((i) + LANE, (n) - 1u) - LANE)
#define SUB (LID / 16u)
#define LF float
#define LU uint
#define LSPLAT(x) (x)
#define LTOF(x) ((float)(x))
#define LTOI(x) ((int)(x))
#define ITOF(x) ((float)(x))
#define LU2F(x) as_float(x)
#define LLD(b, i) (b)[(i) + LANE]
#define LLD8(b, i) ((uint)(b)[(i) + LANE])
#define LLDS8(b, i) ((int)(char)(b)[(i) + LANE])
#define LLD16(b, i) ((uint)(b)[(i) + LANE])
#define LLDH(b, i) F16((uint)(b)[(i) + LANE])
#define LST(b, i, v) (b)[(i) + LANE] = (v)
#define LSTN(b, i, n, v) if ((i) + LANE < (n)) (b)[(i) + LANE] = (v)
#define LST_LOCAL(b, i, v) (b)[(i) + LANE] = (v)
#define LROW(b, at, i, n) (b)[(at) + min((i) + LANE, (n) - 1u)]
#define LSILU(x) SILU(x)
#define LGELU(x) GELU(x)
"""

# One thread a group: barriers wait for nothing, and 16 lanes are one vector. Functions that
# pass it are called by this program alone, so clang need not tell that processors without AVX-512
# pass it otherwise (-Wpsabi).
CL_CPU = (
    r"""
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpsabi"
#endif
#define BARRIER()
#define DEVICE_BARRIER()
#define ATOMIC_TAKE(x) ((x)++)
#define ATOMIC_ADD(x, v) (((x) += (v)) - (v))
#define SHARE(n) (((n) + NGX - 1u) / NGX)
#define FOR_EACH(i, n) for (uint i = GX * SHARE(n), i##_end = min((uint)(n), i + SHARE(n)); i < i##_end; i++)
#define LANE 0u
#define LCLAMP(i, n) (i)
#define SUB 0u
#define LF float16
#define LU uint16
#define LSPLAT(x) ((float16)(x))
#define LTOF(x) convert_float16(x)
#define LTOI(x) as_int16(x)
#define ITOF(x) convert_float16(x)
#define LU2F(x) as_float16(x)
#define LLD(b, i) vload16(0, (b) + (i))
#define LLD8(b, i) convert_uint16(vload16(0, (b) + (i)))
#define LLDS8(b, i) convert_int16(as_char16(vload16(0, (b) + (i))))
#define LLD16(b, i) convert_uint16(vload16(0, (b) + (i)))
#define LLDH(b, i) vload_half16(0, (const __global half*)((b) + (i)))
#define LST(b, i, v) vstore16(v, 0, (b) + (i))
FN void store_lanes(__global float* y, uint i, uint n, float16 v) {
  if (i + 16u <= n) { vstore16(v, 0, y + i); return; }
  float lanes[16];
  vstore16(v, 0, lanes);
  for (uint l = 0u; i + l < n; l++) y[i + l] = lanes[l];
}
#define LSTN(b, i, n, v) store_lanes(b, i, n, v)
#if defined(__clang__) && !defined(SIMULATED) /* oclgrind knows no fetching ahead */
#define AHEAD(b, i) __builtin_prefetch((const void*)(ulong)((b) + (i) + 7168), 0, 2) /* 28 KiB on, into L2 */
#else
#define AHEAD(b, i)
#endif
#define LST_LOCAL(b, i, v) vstore16(v, 0, (b) + (i))
#define LROW(b, at, i, n) vload16(0, (b) + (at) + (i))
#define LPOWER2(n) as_float16(((n) + 127) << 23)
"""
    + VECTORS
)

GL_EXTENSIONS = """#extension GL_EXT_buffer_reference : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_8bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_ballot : require
"""

GL = r"""
#define FN
#define PRECISE precise
#define UNROLL [[unroll]]
#define ROLLED [[dont_unroll]]
#define LID gl_LocalInvocationID.x
#define GX gl_WorkGroupID.x
#define GY gl_WorkGroupID.y
#define NGX gl_NumWorkGroups.x
#define UINT(x) uint(x)
#define INT(x) int(x)
#define FLOAT(x) float(x)
#define UVEC2(a, b) uvec2(a, b)
#define F2U(x) floatBitsToUint(x)
#define U2F(x) uintBitsToFloat(x)
#define U2I(x) int(x)
#define FMA(a, b, c) fma(a, b, c)
#define RINT(x) roundEven(x)
#define FABS(x) abs(x)
#define LOAD16(b, i) uint(b[i])
#define LOAD8(b, i) uint(b[i])
#define STORE16(b, i, v) b[i] = uint16_t(v)
#define STORE8(b, i, v) b[i] = uint8_t(v)
#define BARRIER() barrier()
#define DEVICE_BARRIER() { memoryBarrierBuffer(); barrier(); }
#define ATOMIC_ADD(x, v) atomicAdd(x, v)
#define ATOMIC_TAKE(x) atomicAdd(x, 1u)
#define FOR_EACH(i, n) for (uint i = GX * WG + LID; i < (n); i += NGX * WG)
#define AHEAD(b, i)
#define LANE (LID % 16u)
#define LCLAMP(i, n) (min((i) + LANE, (n) - 1u) - LANE)
#define SUB (LID / 16u)
#define LF float
#define LU uint
#define LSPLAT(x) (x)
#define LTOF(x) float(x)
#define LTOI(x) int(x)
#define ITOF(x) float(x)
#define LU2F(x) uintBitsToFloat(x)
#define LLD(b, i) b[(i) + LANE]
#define LLD8(b, i) uint(b[(i) + LANE])
#define LLDS8(b, i) ((int(b[(i) + LANE]) << 24) >> 24)
#define LLD16(b, i) uint(b[(i) + LANE])
#define LLDH(b, i) F16(uint(b[(i) + LANE]))
#define LST(b, i, v) b[(i) + LANE] = (v)
#define LSTN(b, i, n, v) if ((i) + LANE < (n)) b[(i) + LANE] = (v)
#define LST_LOCAL(b, i, v) b[(i) + LANE] = (v)
#define LROW(b, at, i, n) b[(at) + min((i) + LANE, (n) - 1u)]
#define LSILU(x) SILU(x)
#define LGELU(x) GELU(x)
uint MULHI(uint a, uint b) { uint high, low; umulExtended(a, b, high, low); return high; }
#define LANE8 (gl_SubgroupInvocationID % 8u)
#define FROM_LANE(x, i) subgroupBroadcast(x, i)
float F16(uint bits) { return unpackHalf2x16(bits).x; }
/* packHalf2x16 leaves the rounding open, and AMD's driver rounds toward zero: nearest even, in whole numbers */
uint TO_F16(float x) {
  uint bits = floatBitsToUint(x), sign = bits >> 16u & 0x8000u, a = bits & 0x7fffffffu, e = a >> 23u;
  if (e == 255u) return sign | 0x7c00u | (a > 0x7f800000u ? 0x200u | (a >> 13u & 0x3ffu) : 0u);
  if (e > 112u) return sign | min(a - 0x37fff001u + (a >> 13u & 1u) >> 13u, 0x7c00u);
  uint m = a & 0x7fffffu | 0x800000u, shift = min(126u - e, 31u), rest = m & (1u << shift) - 1u;
  uint h = m >> shift, middle = 1u << shift - 1u;
  return sign | h + uint(rest > middle || rest == middle && (h & 1u) == 1u);
}
"""

COMMON = (
    r"""
#define AHEAD_BLOCKS 8u /* blocks of a weight that are fetched before they are needed, where that is told */
#define INF U2F(0x7f800000u)
#define ISNAN(x) ((F2U(x) & 0x7fffffffu) > 0x7f800000u)
FN float POWER2(int n) { return U2F(UINT(n + 127) << 23); }
"""
    + NUMBERS
    + r"""
FN float LOG(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -INF : U2F(0x7fc00000u);
  if (x >= INF) return x;
  float extra = 0.0f;
  if (x < 1.17549435e-38f) { x *= 8388608.0f; extra = -23.0f; }
  uint bits = F2U(x);
  PRECISE float e = FLOAT(INT(bits >> 23) - 126) + extra;
  PRECISE float m = U2F((bits & 0x007fffffu) | 0x3f000000u);
  if (m < 0.707106781f) { e -= 1.0f; m = m + m; }
  m -= 1.0f;
  PRECISE float z = m * m;
  PRECISE float p = 7.0376836292e-2f;
  p = FMA(p, m, -1.1514610310e-1f);
  p = FMA(p, m, 1.1676998740e-1f);
  p = FMA(p, m, -1.2420140846e-1f);
  p = FMA(p, m, 1.4249322787e-1f);
  p = FMA(p, m, -1.6668057665e-1f);
  p = FMA(p, m, 2.0000714765e-1f);
  p = FMA(p, m, -2.4999993993e-1f);
  p = FMA(p, m, 3.3333331174e-1f);
  p = p * m * z;
  p = FMA(e, -2.12194440e-4f, p);
  p = FMA(z, -0.5f, p);
  return FMA(e, 0.693359375f, m + p);
}
FN uvec2 quadrant(float x) { /* bits of the reduced angle, and the quarter turn */
  PRECISE float n = RINT(x * 0.636619772f);
  PRECISE float r = FMA(n, -1.5703125f, x);
  r = FMA(n, -4.83751296997e-4f, r);
  r = FMA(n, -7.54978995489e-8f, r);
  return UVEC2(F2U(r), UINT(INT(n)) & 3u);
}
FN float SIN_PART(float r) {
  float z = r * r;
  float p = FMA(FMA(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f);
  return FMA(p * z, r, r);
}
FN float COS_PART(float r) {
  float z = r * r;
  float p = FMA(FMA(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f);
  return FMA(p * z, z, FMA(-0.5f, z, 1.0f));
}
FN float SIN(float x) {
  uvec2 q = quadrant(x);
  float r = U2F(q.x);
  float v = (q.y & 1u) != 0u ? COS_PART(r) : SIN_PART(r);
  return (q.y & 2u) != 0u ? -v : v;
}
FN float COS(float x) {
  uvec2 q = quadrant(x);
  float r = U2F(q.x);
  float v = (q.y & 1u) != 0u ? SIN_PART(r) : COS_PART(r);
  return ((q.y + 1u) & 2u) != 0u ? -v : v;
}
"""
)

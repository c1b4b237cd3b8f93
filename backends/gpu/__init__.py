"""GPU kernels, written once for OpenCL and Vulkan, and the lowering of ops to their launches.

**A kernel** (`language.dialect.Kernel`) is a body in a portable subset of C, which is rendered to
OpenCL C and to GLSL:

* Buffers have names in capitals and are indexed only (`X[i]`, no pointers). Parameters are 32-bit
  words in small letters. Element types are f32, u32, i32, u16 and u8 (u64 in kernels of `SOFT`
  alone, u32x4 in kernels of Vulkan alone). u16 and u8 are read with `LOAD16(X, i)`, `LOAD8(X, i)`
  (uint) and written with `STORE16(X, i, v)`, `STORE8(X, i, v)`.
* Variables are uint, int, float, bool, uvec2 (`UVEC2(a, b)`) or arrays of a constant size. Casts
  are `UINT(x)`, `INT(x)`, `FLOAT(x)`; bit casts `F2U`, `U2F`. The prelude has `EXP`, `LOG`, `SIN`,
  `COS`, `TANH` (the same bits on every device), `FMA`, `RINT`, `FABS`, `F16(bits)`, `TO_F16(x)`.
  Functions begin with `FN`.
* `LID` is the thread in its work group of `WG` threads, `GX GY` the group, `NGX` the number of
  groups. `FOR_EACH(i, n)` walks n elements with all threads of all groups. `BARRIER()` stands in
  uniform control flow only. Local memory is declared in `local`.
* Constants are `#define`s. A *variant* is one choice of them. Every kernel lists all its variants,
  so that SPIR-V can be compiled during development.

**Device classes** (`language.dialect.Shape`) decide the meaning of a SIMD lane. `SIMT` (GPUs): a lane is a
thread. `CPU` (OpenCL on a CPU): a work group is one thread, and lanes are the elements of a float16
vector. `SOFT` (Vulkan on a CPU) is `SIMT` with smaller groups and a `linear` of its own. Bodies
that depend on it use `LF LU LI`, `LLD(X, i)`, `LST(X, i, v)`: `LANES` numbers at once.

**Fewer launches**: `fuse` (fuse.py) merges nodes before memory planning (graph/ops/fused.py). A
kernel may choose among buffers (`Arg.of`, `CHOOSE(i)`), so that one launch has several weights.

**Duties of a runtime** (backends/opencl, backends/vulkan):

* `supports`, `rewrite`, `constant_nbytes`, `pack` (device.py) answer for the backend protocol's
  methods.
* `dispatches(t, shape)` (device.py) returns the launches of a node: `Dispatch(kernel, defines,
  buffers, words, groups, scratch)`. They run in order; each sees what those before it wrote
  (`Kernel.args` says which buffers are written).
* A dispatch with a `choice` has variants of its kernel, of which `choice.of_run` tells the one of
  each run. A variant is compiled, and its launch recorded or bound, at its first use.
* A buffer of a dispatch is `(tensor, byte offset)`. Tensor None is the scratch: memory of the
  runtime, at least `Dispatch.scratch` bytes, shared by all dispatches. Offsets are multiples of the
  element's size and of nothing more.
* OpenCL: arguments are, per buffer, the cl_mem and a ulong byte offset, then the words, 4 raw bytes
  each. Work size: groups × `Kernel.threads(defines)`, local size `Kernel.threads(defines)`.
* Vulkan: push constants are the buffers' device addresses (8 bytes each, offset added), then the
  words (4 bytes each); at most 128 bytes, which `Kernel` checks. `groups` is the dispatch's count.
* `KERNELS[name].variants(SIMT)` and `(SOFT)` with `render_glsl(kernel, defines)` enumerate all that
  is compiled ahead. It needs bufferDeviceAddress, storageBuffer16BitAccess and 8BitAccess; `SOFT`
  also subgroup ballots and 64-bit integers."""

"""Device code for OpenCL and Vulkan, written once, and the lowering of ops to dispatches that both backends share.

**A kernel** (`dialect.Kernel`) is a body in a portable subset of C, rendered to OpenCL C and to GLSL:

* Buffers are named in capitals and only indexed (`X[i]`, no pointers), parameters are 32-bit words in small letters.
  Types of elements: f32, u32, i32 (u64 in kernels of SOFT alone), and u16 and u8, which are read with `LOAD16(X, i)`,
  `LOAD8(X, i)` (uint) and
  written with `STORE16(X, i, v)`, `STORE8(X, i, v)`.
* Types of variables: uint, int, float, bool, uvec2 (made with `UVEC2(a, b)`) and arrays of a constant size. Casts are
  `UINT(x)`, `INT(x)`, `FLOAT(x)`; bits `F2U`, `U2F`; functions of the prelude: `EXP`, `LOG`, `SIN`, `COS`, `TANH` (our
  own, the same bits everywhere), `FMA`, `RINT`, `FABS`, `F16(bits)`, `TO_F16(x)`. Functions begin with `FN`.
* `LID` is the thread in its group of `WG`, `GX GY` the group, `NGX` how many groups; `FOR_EACH(i, n)` walks n elements
  with all threads of all groups. `BARRIER()` in uniform control flow only; local memory is declared in `local`.
* Constants are `#define`s: a *variant* is one choice of them, and every kernel lists all of its variants, so that
  SPIR-V can be compiled when the project is developed.

**Shapes** (`dialect.Shape`): a device class decides how a body is laid on the machine. `SIMT`: a lane is a thread.
`CPU` (an OpenCL CPU device): a work group is one thread, and lanes are the elements of a float16 vector. Bodies that
care use `LF LU LI`, `LLD(X, i)`, `LST(X, i, v)`: `LANES` numbers at once. Vulkan has SIMT only.

**Fewer launches**: `fuse` (fuse.py) puts nodes in the place of several, before memory is laid out (graph/ops/fused.py);
a kernel may choose among buffers (`Arg.of`, `CHOOSE(i)`), so that one launch has several weights.

**What a runtime does** (backends/opencl, backends/vulkan):

* `supports`, `rewrite`, `constant_nbytes`, `pack` (device.py) answer for the backend protocol's methods.
* `dispatches(t, shape)` (device.py) gives what a node runs: `Dispatch(kernel, defines, buffers, words, groups,
  scratch)`. Run them in order, each seeing all that those before it wrote (`Kernel.args` tells which are written).
* A buffer of a dispatch is `(tensor, byte offset)`: the tensor's place, moved by the offset. Tensor None is the
  scratch: memory of the runtime of at least `Dispatch.scratch` bytes, shared by all dispatches. Offsets are multiples
  of the element's size and of nothing more.
* OpenCL: arguments are, per buffer, the cl_mem and a ulong byte offset, then the words as 4 raw bytes each.
  Work size: groups × `Kernel.threads(defines)`, local size `Kernel.threads(defines)`.
* Vulkan: push constants are the buffers' device addresses (8 bytes each, offset added), then the words (4 bytes each);
  at most 128 bytes, which `Kernel` checks. `groups` is the dispatch's count.
* `KERNELS[name].variants(SIMT)` and `(SOFT)` with `render_glsl(kernel, defines)` enumerate everything there is to
  compile ahead. Needs bufferDeviceAddress, storageBuffer16BitAccess and 8BitAccess, and for SOFT also subgroup ballots
  and 64-bit integers.
"""

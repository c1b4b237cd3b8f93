"""The step: walk an instruction table on several threads, without Python and without locks.

Instruction i is 8 words: function, argument block, n_units, grain, n_chunks, end of its run, address and bytes of what
its first chunk streams from memory (the next chunk's follows; 0: nothing to speak of). Its units are
handed out in chunks of `grain` from an atomic counter, so a core that is taken away delays no more than the chunk that
it holds, and the next instruction starts when the count of finished chunks is complete: the barrier is that count.
Every counter carries the step's generation in its upper bits: an older one counts as zero, and a thread that slept
through a step sees a newer one and leaves.

Instructions of a single chunk follow each other in runs (`end`: the first after the run). Thread 0 does these, so that
what one writes is in the cache of the core that reads it; the others look only at the last one's count, and help
after a while in case thread 0 has lost its core.

A thread that waits has its core fetch what it will probably stream next, for a step with few rows is bound by memory.

A thread reads the generation, then the table, then the number of instructions, which carries the generation too and is
0 between steps: so it never takes the next step's table for the one that it woke up for.

Control block, one 64-byte line each (word index): 0 generation · 8 table, 9 the next one · 16 n_instructions, stamped,
17 the next number · 24 scratch address ·
32 scratch bytes per thread · 40 counters' address (two words, next and done, per instruction in a line of their own) ·
48 stop · 56 threads inside a step · 64+8w: worker w is parked.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backends.cpu.kernels.registry import i64p, kernel

I64, I32, I8P = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
TABLE, N_INSTRUCTIONS, SCRATCH, SCRATCH_BYTES, COUNTERS, STOP, INSIDE, PARKED = 8, 16, 24, 32, 40, 48, 56, 64
SHIFT = 24  # bits of a count; the generation above it lasts for years
LOW = (1 << SHIFT) - 1
PATIENCE = 2000  # looks at a counter, some 60 ns each, before a thread lets others have its core
NEAR = 16  # instructions: what streams later is not next, and tables of training have none among thousands
FETCHES = 4  # cache lines asked for between two looks at a counter
HELP = 100  # looks before the other threads help thread 0 with instructions of a single chunk


@intrinsic
def atomic_load(typingctx, address):
    def codegen(ctx, b, sig, a):
        return b.load_atomic(b.inttoptr(a[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    def codegen(ctx, b, sig, a):
        b.store_atomic(a[1], b.inttoptr(a[0], I64.as_pointer()), "seq_cst", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    def codegen(ctx, b, sig, a):
        return b.atomic_rmw("add", b.inttoptr(a[0], I64.as_pointer()), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange(typingctx, address, value):
    def codegen(ctx, b, sig, a):
        return b.atomic_rmw("xchg", b.inttoptr(a[0], I64.as_pointer()), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_and_swap(typingctx, address, expected, value):
    def codegen(ctx, b, sig, a):
        pair = b.cmpxchg(b.inttoptr(a[0], I64.as_pointer()), a[1], a[2], "seq_cst", "monotonic")
        return b.zext(b.extract_value(pair, 1), I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    def codegen(ctx, b, sig, a):
        if "x86" in b.module.triple or "i686" in b.module.triple:
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return ctx.get_dummy_value()

    return types.void(), codegen


@intrinsic
def fetch(typingctx, address):
    """Have the core read a cache line into its second-level cache; an address that does not exist is no fault."""

    def codegen(ctx, b, sig, a):
        kind = ir.FunctionType(ir.VoidType(), [I8P, I32, I32, I32])
        f = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        b.call(f, [b.inttoptr(a[0], I8P), *(ir.Constant(I32, v) for v in (0, 2, 1))])
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def call(typingctx, function, block, begin, end, scratch):
    """Call a kernel by its address; kernels cannot fail, so the status is dropped."""

    def codegen(ctx, b, sig, a):
        kind = ir.FunctionType(I32, [I8P.as_pointer(), I8P.as_pointer(), I64, I64, I64, I64])
        out, exception = cgutils.alloca_once(b, I8P), cgutils.alloca_once(b, I8P)
        b.call(b.inttoptr(a[0], kind.as_pointer()), [out, exception, *a[1:]])
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


yield_cpu = types.ExternalFunction("sched_yield", types.int32())
read_fd = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
write_fd = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


def _walk():
    from numba import njit

    @njit(forceinline=True)
    def streamed_next(table, i, n, thread):
        """Begin and end of what this thread would stream in the next instruction from i on that streams anything."""
        n = min(n, i + NEAR)
        while i < n:
            ins = i64p(table + i * 64)
            if ins[7] > 0:
                first = ins[6] + thread * ins[7]
                return first, first + ins[7] if thread < ins[4] else first
            i += 1
        return 0, 0

    @njit(forceinline=True)
    def wait(done, complete, generation, limit, ahead):
        """1 when the count is complete, 0 when `limit` looks were not enough, −1 when the step is over. Fetches the
        memory between the two addresses of `ahead` in the meantime."""
        spins = 0
        line, stop = ahead
        while True:
            word = atomic_load(done)
            if word == complete:
                return 1
            if (word >> SHIFT) > generation:
                return -1
            spins += 1
            if spins == limit:
                return 0
            if line < stop:
                for _ in range(FETCHES):
                    fetch(line)
                    line += 64
            elif spins < PATIENCE:
                pause()
            else:  # the holder of a chunk has lost its core: let it have ours
                yield_cpu()

    @njit(forceinline=True)
    def walk(ctl, generation, thread):
        """This thread's part of one step; leaves at once when the step is over or was another one."""
        c = i64p(ctl)
        table = atomic_load(ctl + TABLE * 8)
        stamped = atomic_load(ctl + N_INSTRUCTIONS * 8)
        if (stamped >> SHIFT) != generation:
            return
        n = stamped & LOW
        counters = c[COUNTERS]
        scratch = c[SCRATCH] + thread * c[SCRATCH_BYTES]
        stamp = generation << SHIFT
        i = 0
        while i < n:
            ins = i64p(table + i * 64)
            function, block, units, grain, chunks, end = ins[0], ins[1], ins[2], ins[3], ins[4], ins[5]
            if thread != 0 and end > i:
                ahead = streamed_next(table, end, n, thread)
                over = wait(counters + (end - 1) * 64 + 8, stamp + 1, generation, HELP, ahead)
                if over < 0:
                    return
                if over > 0:
                    i = end
                    continue
            following = counters + i * 64
            done = following + 8
            while True:
                word = atomic_load(following)
                if (word >> SHIFT) > generation:
                    return
                chunk = word & LOW if (word >> SHIFT) == generation else 0
                if chunk >= chunks:
                    break
                if compare_and_swap(following, word, stamp + chunk + 1):
                    call(function, block, chunk * grain, min(units, (chunk + 1) * grain), scratch)
                    finished = 0
                    while finished == 0:
                        word = atomic_load(done)
                        count = word & LOW if (word >> SHIFT) == generation else 0
                        finished = compare_and_swap(done, word, stamp + count + 1)
            if wait(done, stamp + chunks, generation, -1, streamed_next(table, i + 1, n, thread)) < 0:
                return
            i += 1

    return walk


@kernel("step")
def step():
    """f(ctl, n_threads, pipes): run the published table as thread 0; `pipes` holds each worker's write end."""
    walk = _walk()

    def run(ctl, n_threads, pipes, _unused):
        c = i64p(ctl)
        table, n = c[TABLE + 1], c[N_INSTRUCTIONS + 1]
        if n_threads == 1:
            for i in range(n):
                ins = i64p(table + i * 64)
                call(ins[0], ins[1], 0, ins[2], c[SCRATCH])
            return
        generation = atomic_load(ctl) + 1
        atomic_store(ctl + TABLE * 8, table)
        atomic_store(ctl + N_INSTRUCTIONS * 8, (generation << SHIFT) + n)
        atomic_store(ctl, generation)
        for w in range(1, n_threads):
            if atomic_exchange(ctl + (PARKED + 8 * w) * 8, 0) == 1:
                write_fd(i64p(pipes)[w], ctl, 1)
        walk(ctl, generation, 0)
        atomic_store(ctl + N_INSTRUCTIONS * 8, generation << SHIFT)  # who wakes late finds nothing to look at

    run.signature = types.void(*[types.int64] * 4)
    return run


@kernel("worker")
def worker():
    """f(ctl, thread, pipe, spins): serve steps until told to stop; after `spins` empty looks, sleep on the pipe."""
    walk = _walk()

    def run(ctl, thread, pipe, spins):
        last = atomic_load(ctl)
        parked = ctl + (PARKED + 8 * thread) * 8
        idle = 0
        while True:
            atomic_add(ctl + INSIDE * 8, 1)
            generation = atomic_load(ctl)
            stop = atomic_load(ctl + STOP * 8)
            if generation != last and stop == 0:
                last = generation
                walk(ctl, generation, thread)
                idle = 0
            atomic_add(ctl + INSIDE * 8, -1)
            if stop:
                return
            idle += 1
            if idle < spins:
                pause()
                continue
            idle = 0
            atomic_store(parked, 1)
            woken = atomic_load(ctl) != last or atomic_load(ctl + STOP * 8) != 0
            if woken and atomic_exchange(parked, 0) == 1:
                continue  # nobody saw us asleep: no byte is on its way
            read_fd(pipe, ctl + (PARKED + 8 * thread + 1) * 8, 1)

    run.signature = types.void(*[types.int64] * 4)
    return run

"""The step: walk a table of stages on several threads, without Python and without locks.

A stage is work that needs what the stages before it made, and nothing of its own. It is 8 words: address of its first
instruction, their number, chunks of them all (0: a serial stage), and in the last two when it was done (seconds and
nanoseconds of the monotonic clock; only `step:timed` looks at it). An instruction is 8 words: function, argument block,
end of its units, grain, n_chunks, address and bytes of what its first chunk streams from memory (the next chunk's
follows; 0: nothing to speak of), first unit. Its units are handed out in chunks of `grain`.

A thread has a stretch of a stage's chunks of its own, so that it reads weights one after the other, and counts what it
has taken of it in a line of its own, so that taking costs nothing. When it is through it takes from the other threads'
stretches: a core that is taken away delays no more than the chunk that it holds. The next stage starts when the count
of finished chunks is complete, to which each thread adds once: the barrier is that count. Every counter carries the
step's generation in its upper bits: an older one counts as zero, and a thread that slept through a step sees a newer
one and leaves.

A serial stage is instructions of one chunk each, one after the other: a single chunk of thread 0's stretch. Thread 0
does it, so that what one instruction writes is in the cache of the core that reads it; the others take it after a while
in case thread 0 has lost its core.

A thread that waits has its core fetch what it will stream next, an eighth of what its second-level cache holds, for a
step with few rows is bound by memory. A worker between steps fetches what it streamed first, half of that cache: most
steps begin like the last. A thread that has waited for long looks after the others (stalled.py).

A thread reads the generation, then the table, then the number of stages, which carries the generation too and is
0 between steps: so it never takes the next step's table for the one that it woke up for.

Control block, one 64-byte line each (word index): 0 generation · 8 table, 9 the next one · 16 n_stages, stamped,
17 the next number · 24 scratch address · 32 scratch bytes per thread · 40 counters' address (a line for each stage's
finished chunks, and one for each thread's stretch), 41 n_threads, 42 bytes that a worker fetches between steps,
43 threads that take part in this step (the others' stretches, too, are theirs), 44 where stalled.py keeps masks ·
48 stop · 56 threads inside a step · 64+8t: of each thread, worker t is parked, a byte of its pipe's, and what
stalled.py knows.
"""

from __future__ import annotations

import time

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir.builder import fetch, for_x86
from logitless.backends.cpu.kernels.ir.registry import i64p, kernel
from logitless.backends.cpu.kernels.matmul.layout import FOLLOWING
from logitless.backends.cpu.kernels.runtime.stall_rescue import (
    HOLDS,
    NOBODY,
    doze,
    help_out,
    line_of,
    read_clock,
    send_home,
    settle,
    was_brought,
)

I64, I32, I8P = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
TABLE, N_STAGES, SCRATCH, SCRATCH_BYTES, COUNTERS, STOP, INSIDE, PARKED = 8, 16, 24, 32, 40, 48, 56, 64
TAKE_PART = COUNTERS + 3
SHIFT = 24  # bits of a count; the generation above it lasts for years
LOW = (1 << SHIFT) - 1
PATIENCE = 2000  # looks at a counter, some 60 ns each, before a thread lets others have its core
BETWEEN_LOOKS = 512  # more of them before it looks after the others, and before it does so again: 0.3 ms
NEAR = 6  # stages: what streams later is not next, and tables of training have none among thousands
REACH = 4  # of what a worker fetches between steps, the part that a thread asks for before it is due
FETCHES = 16  # cache lines asked for between two looks at a counter: what a core has under way
CLOCK = time.CLOCK_MONOTONIC
DONE = 48  # bytes into a stage
HELP = 100  # looks before the other threads take a serial stage from thread 0
COMPLETE, TIRED, OVER = 1, 0, -1  # how a wait ends


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
        if for_x86(b):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return ctx.get_dummy_value()

    return types.void(), codegen


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


def _walk(timed=False):
    """`timed`: thread 0 writes into each stage when it was done."""

    @njit(forceinline=True)
    def streamed_next(stages, i, n, thread, n_threads, reach):
        """Begin and end of what this thread will stream in the next stage from i on that streams anything, of at most
        `reach` bytes."""
        n = min(n, i + NEAR)
        while i < n:
            stage = i64p(stages + i * 64)
            chunk, stop = stage[2] * thread // n_threads, stage[2] * (thread + 1) // n_threads
            ins = stage[0]
            while chunk < stop and chunk >= i64p(ins)[4]:
                chunk, stop, ins = chunk - i64p(ins)[4], stop - i64p(ins)[4], ins + 64
            if i64p(ins)[6] > 0:
                first = i64p(ins)[5] + chunk * i64p(ins)[6]
                return first, min(first + reach, i64p(ins)[5] + min(stop, i64p(ins)[4]) * i64p(ins)[6])
            i += 1
        return 0, 0

    @njit(forceinline=True)
    def wait(ctl, thread, done, complete, generation, limit, ahead):
        """COMPLETE when the count is, TIRED when `limit` looks were not enough, OVER when the step is. Fetches the
        memory between the two addresses of `ahead` in the meantime."""
        spins, helped = 0, NOBODY
        line, stop = ahead
        while True:
            word = atomic_load(done)
            if word == complete:
                if helped > 0:
                    send_home(ctl, helped)
                return COMPLETE
            if (word >> SHIFT) > generation:
                return OVER
            spins += 1
            if spins == limit:
                return TIRED
            if line < stop:
                for _ in range(FETCHES):
                    fetch(line)
                    line += 64
            elif spins < PATIENCE:
                pause()
            elif helped != NOBODY:
                doze()
            else:  # the holder of a chunk has lost its core, perhaps to a thread that may run on ours
                yield_cpu()
                if spins % BETWEEN_LOOKS == 0:
                    helped = help_out(ctl, thread, i64p(ctl)[TAKE_PART], generation)

    @njit(forceinline=True)
    def take(counter, generation, most):
        """The next chunk of a stretch of `most`, and takes it; −1 when there is none left, −2 when the step is over."""
        while True:
            word = atomic_load(counter)
            if (word >> SHIFT) > generation:
                return -2
            chunk = word & LOW if (word >> SHIFT) == generation else 0
            if chunk >= most:
                return -1
            if compare_and_swap(counter, word, (generation << SHIFT) + chunk + 1):
                return chunk

    @njit(forceinline=True)
    def do_serial(stage, scratch):
        i64p(scratch - FOLLOWING)[0] = 0
        first, n = i64p(stage)[0], i64p(stage)[1]
        for at in range(first, first + n * 64, 64):
            ins = i64p(at)
            for begin in range(ins[7], ins[2], ins[3]):  # of one thread's work: what scratch is for is a chunk
                call(ins[0], ins[1], begin, min(ins[2], begin + ins[3]), scratch)

    @njit(forceinline=True)
    def do_chunk(stage, chunk, scratch, last, following):
        """`following`: where the thread streams after the `last` chunk of a stretch."""
        at = i64p(stage)[0]
        while chunk >= i64p(at)[4]:
            chunk, at = chunk - i64p(at)[4], at + 64
        ins = i64p(at)
        if not last:
            following = i64p(at + 64)[5] if chunk == ins[4] - 1 else 0
        i64p(scratch - FOLLOWING)[0] = following
        begin = ins[7] + chunk * ins[3]
        call(ins[0], ins[1], begin, min(ins[2], begin + ins[3]), scratch)

    @njit(forceinline=True)
    def walk(ctl, generation, thread):
        """This thread's part of one step; leaves at once when the step is over or was another one. Returns its stages
        and their number; none if it left."""
        c = i64p(ctl)
        stages = atomic_load(ctl + TABLE * 8)
        stamped = atomic_load(ctl + N_STAGES * 8)
        if (stamped >> SHIFT) != generation:
            return stages, 0
        n, n_threads, reach = stamped & LOW, c[COUNTERS + 1], c[COUNTERS + 2] // REACH
        scratch = c[SCRATCH] + thread * c[SCRATCH_BYTES]
        stamp, mine = generation << SHIFT, line_of(ctl, thread)
        for i in range(n):
            stage = stages + i * 64
            done = c[COUNTERS] + i * (n_threads + 1) * 64
            chunks = i64p(stage)[2]
            ahead = streamed_next(stages, i + 1, n, thread, n_threads, reach)
            finished = 0
            if chunks == 0:
                if thread != 0:
                    end = wait(ctl, thread, done, stamp + 1, generation, HELP, ahead)
                    if end == OVER:
                        return stages, 0
                    if end == COMPLETE:
                        continue
                if take(done + 64, generation, 1) == 0:
                    i64p(mine)[HOLDS] = 1
                    do_serial(stage, scratch)
                    i64p(mine)[HOLDS] = 0
                    finished = 1
            else:
                for turn in range(n_threads):
                    owner = (thread + turn) % n_threads
                    first = chunks * owner // n_threads
                    most = chunks * (owner + 1) // n_threads - first
                    while most > 0:
                        chunk = take(done + 64 + owner * 64, generation, most)
                        if chunk < 0:
                            break
                        i64p(mine)[HOLDS] = 1
                        do_chunk(stage, first + chunk, scratch, chunk == most - 1, ahead[0])
                        i64p(mine)[HOLDS] = 0
                        finished += 1
            added = finished == 0
            while not added:
                word = atomic_load(done)
                count = word & LOW if (word >> SHIFT) == generation else 0
                added = compare_and_swap(done, word, stamp + count + finished) != 0
            if was_brought(mine, generation):
                settle(ctl, thread, generation)
            complete = stamp + max(chunks, 1)
            if wait(ctl, thread, done, complete, generation, -1, ahead) == OVER:
                return stages, 0
            if timed and thread == 0:
                read_clock(CLOCK, stage + DONE)
        return stages, n

    return walk, do_serial


@njit(forceinline=True)
def fetch_first(ctl, generation, thread, stages, n):
    """Until the next step begins, fetch what this thread's stretches of these stages stream."""
    n_threads, left = i64p(ctl)[COUNTERS + 1], i64p(ctl)[COUNTERS + 2]
    for i in range(n):
        first, count, chunks = i64p(stages + i * 64)[0], i64p(stages + i * 64)[1], i64p(stages + i * 64)[2]
        begin, end = chunks * thread // n_threads, chunks * (thread + 1) // n_threads
        for at in range(first, first + count * 64, 64):
            ins = i64p(at)
            line, stop = ins[5] + max(begin, 0) * ins[6], ins[5] + min(end, ins[4]) * ins[6]
            begin, end = begin - ins[4], end - ins[4]
            while line < stop:
                if atomic_load(ctl) != generation or left <= 0:
                    return
                for _ in range(FETCHES):
                    fetch(line)
                    line += 64
                left -= FETCHES * 64


@kernel("step")
def step(clock=""):
    """f(ctl, n_threads, pipes): run the published table as thread 0, with so many threads of those that there are;
    `pipes` holds each worker's write end."""
    timed = clock == "timed"
    walk, do_serial = _walk(timed)

    def run(ctl, n_threads, pipes, _unused):
        c = i64p(ctl)
        table, n = c[TABLE + 1], c[N_STAGES + 1]
        if n_threads == 1:
            for i in range(n):
                do_serial(table + i * 64, c[SCRATCH])
                if timed:
                    read_clock(CLOCK, table + i * 64 + DONE)
            return
        generation = atomic_load(ctl) + 1
        c[TAKE_PART] = n_threads
        atomic_store(ctl + TABLE * 8, table)
        atomic_store(ctl + N_STAGES * 8, (generation << SHIFT) + n)
        atomic_store(ctl, generation)
        for w in range(1, n_threads):
            if atomic_exchange(ctl + (PARKED + 8 * w) * 8, 0) == 1:
                write_fd(i64p(pipes)[w], ctl, 1)
        walk(ctl, generation, 0)
        atomic_store(ctl + N_STAGES * 8, generation << SHIFT)  # who wakes late finds nothing to look at

    run.signature = types.void(*[types.int64] * 4)
    return run


@kernel("worker")
def worker():
    """f(ctl, thread, pipe, spins): serve steps until told to stop; after `spins` empty looks, sleep on the pipe."""
    walk, _ = _walk()

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
                if thread < i64p(ctl)[TAKE_PART]:
                    stages, n = walk(ctl, generation, thread)
                    fetch_first(ctl, generation, thread, stages, n)
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

"""Step loop: runs a task list on several threads, without Python and without locks.

A phase is work that depends on earlier phases only. Its chunks are statically partitioned among the
threads, so that each reads its weights in order. A thread counts what it has taken of its own part
on a cache line of its own, so that taking is free. Then it steals from the other threads' parts: a
preempted core delays no more than the chunk it holds. The barrier is a count of finished chunks, to
which each thread adds once. Every counter has the step's generation in its upper bits: an older one
counts as zero, and a thread that slept through a step sees a newer one and leaves.

A serial phase is tasks of one chunk each, in order. It counts as a single chunk of thread 0's part,
so that a task's result is in the cache of the core that reads it. The others take it after a while,
in case thread 0 has lost its core.

A waiting thread prefetches the weights of its next phase, up to an eighth of its L2 cache, because
a step with few rows is bound by memory. Between steps a worker prefetches its first weights, up to
half of that cache: most steps begin like the last. A thread that waits for long checks for
preempted threads (stall_rescue.py).

A thread reads the generation, then the phases' address, then their number, which carries the
generation too and is 0 between steps. So it never takes the next step's phases for those of its
own.

The control block and the records of phases and tasks are in control_block.py."""

from __future__ import annotations

import time

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir.builder import is_x86, prefetch_l2
from logitless.backends.cpu.kernels.ir.registry import i64p, kernel
from logitless.backends.cpu.kernels.runtime.control_block import (
    COUNTERS,
    END_TIME,
    HOLDS_CHUNK,
    IDLE_PREFETCH_NBYTES,
    INSIDE,
    LINE,
    N_ACTIVE,
    N_PHASES,
    N_THREADS,
    NEXT_N_PHASES,
    NEXT_PHASES,
    NEXT_WEIGHTS,
    PARKED,
    PHASES,
    PIPE_BYTE,
    SCRATCH,
    SCRATCH_NBYTES,
    STOP,
    THREADS,
)
from logitless.backends.cpu.kernels.runtime.stall_rescue import (
    NOBODY,
    finish_migration,
    line_of,
    read_clock,
    rescue_preempted,
    restore_affinity,
    sleep_briefly,
    was_migrated,
)

I64, I32, I8P = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
COUNT_BITS = 24  # bits of a count; the generation above it lasts for years
COUNT_MASK = (1 << COUNT_BITS) - 1
YIELD_POLLS = 2000  # polls of a counter, 60 ns each, before a thread yields its core
RESCUE_POLLS = 512  # further polls before each check for preempted threads: 0.3 ms
LOOKAHEAD = 6  # phases to look ahead; task lists of training prefetch nothing
WAIT_SHARE = 4  # a waiting thread's share of a worker's prefetch between steps
PREFETCH_LINES = 16  # cache lines prefetched between two polls: a core's misses in flight
CLOCK = time.CLOCK_MONOTONIC
SERIAL_POLLS = 100  # polls before other threads take a serial phase
COMPLETE, TIMED_OUT, OVER = 1, 0, -1  # results of a wait


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
        if is_x86(b):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return ctx.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call(typingctx, function, block, begin, end, scratch):
    """Call a kernel by its address. Kernels cannot fail, so the status is dropped."""

    def codegen(ctx, b, sig, a):
        kind = ir.FunctionType(I32, [I8P.as_pointer(), I8P.as_pointer(), I64, I64, I64, I64])
        out, exception = cgutils.alloca_once(b, I8P), cgutils.alloca_once(b, I8P)
        b.call(b.inttoptr(a[0], kind.as_pointer()), [out, exception, *a[1:]])
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


yield_cpu = types.ExternalFunction("sched_yield", types.int32())
read_fd = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
write_fd = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


def _phase_runner(timed=False):
    """The walk of one step, and the serial phase. `timed`: thread 0 records the end of each phase."""

    @njit(forceinline=True)
    def next_weights(phases, i, n, thread, n_threads, reach):
        """Begin and end of the weights that this thread reads in the next phase that reads any.

        It looks from phase i on, at up to `reach` bytes."""
        n = min(n, i + LOOKAHEAD)
        while i < n:
            phase = i64p(phases + i * 64)
            chunk, stop = phase[2] * thread // n_threads, phase[2] * (thread + 1) // n_threads
            task = phase[0]
            while chunk < stop and chunk >= i64p(task)[4]:
                chunk, stop, task = chunk - i64p(task)[4], stop - i64p(task)[4], task + 64
            if i64p(task)[6] > 0:
                first = i64p(task)[5] + chunk * i64p(task)[6]
                return first, min(first + reach, i64p(task)[5] + min(stop, i64p(task)[4]) * i64p(task)[6])
            i += 1
        return 0, 0

    @njit(forceinline=True)
    def wait(ctl, thread, done, complete, generation, limit, prefetch):
        """Wait for a count: COMPLETE, TIMED_OUT after `limit` polls, or OVER when the step is.

        Prefetches the memory between the two addresses of `prefetch` meanwhile."""
        spins, migrated = 0, NOBODY
        address, stop = prefetch
        while True:
            word = atomic_load(done)
            if word == complete:
                if migrated > 0:
                    restore_affinity(ctl, migrated)
                return COMPLETE
            if (word >> COUNT_BITS) > generation:
                return OVER
            spins += 1
            if spins == limit:
                return TIMED_OUT
            if address < stop:
                for _ in range(PREFETCH_LINES):
                    prefetch_l2(address)
                    address += 64
            elif spins < YIELD_POLLS:
                pause()
            elif migrated != NOBODY:
                sleep_briefly()
            else:  # the holder of a chunk has lost its core, perhaps to a thread that may run here
                yield_cpu()
                if spins % RESCUE_POLLS == 0:
                    migrated = rescue_preempted(ctl, thread, i64p(ctl)[N_ACTIVE], generation)

    @njit(forceinline=True)
    def take_chunk(counter, generation, most):
        """Take the next chunk of a part of `most`; −1 when none is left, −2 when the step is over."""
        while True:
            word = atomic_load(counter)
            if (word >> COUNT_BITS) > generation:
                return -2
            chunk = word & COUNT_MASK if (word >> COUNT_BITS) == generation else 0
            if chunk >= most:
                return -1
            if compare_and_swap(counter, word, (generation << COUNT_BITS) + chunk + 1):
                return chunk

    @njit(forceinline=True)
    def run_serial(phase, scratch):
        i64p(scratch - NEXT_WEIGHTS)[0] = 0
        first, n = i64p(phase)[0], i64p(phase)[1]
        for at in range(first, first + n * 64, 64):
            task = i64p(at)
            # one chunk at a time: scratch is sized for a chunk
            for begin in range(task[7], task[2], task[3]):
                call(task[0], task[1], begin, min(task[2], begin + task[3]), scratch)

    @njit(forceinline=True)
    def run_chunk(phase, chunk, scratch, last, following):
        """Run a chunk. `following`: the thread's next weights after the `last` chunk of its part."""
        at = i64p(phase)[0]
        while chunk >= i64p(at)[4]:
            chunk, at = chunk - i64p(at)[4], at + 64
        task = i64p(at)
        if not last:
            following = i64p(at + 64)[5] if chunk == task[4] - 1 else 0
        i64p(scratch - NEXT_WEIGHTS)[0] = following
        begin = task[7] + chunk * task[3]
        call(task[0], task[1], begin, min(task[2], begin + task[3]), scratch)

    @njit(forceinline=True)
    def run_phases(ctl, generation, thread):
        """This thread's part of a step. Leaves early when the step is over, or was another one.

        Returns the phases and their number; 0 if it left."""
        c = i64p(ctl)
        phases = atomic_load(ctl + PHASES * 8)
        n_stamped = atomic_load(ctl + N_PHASES * 8)
        if (n_stamped >> COUNT_BITS) != generation:
            return phases, 0
        n, n_threads, reach = n_stamped & COUNT_MASK, c[N_THREADS], c[IDLE_PREFETCH_NBYTES] // WAIT_SHARE
        scratch = c[SCRATCH] + thread * c[SCRATCH_NBYTES]
        stamp, own = generation << COUNT_BITS, line_of(ctl, thread)
        for i in range(n):
            phase = phases + i * 64
            done = c[COUNTERS] + i * (n_threads + 1) * 64
            chunks = i64p(phase)[2]
            prefetch = next_weights(phases, i + 1, n, thread, n_threads, reach)
            finished = 0
            if chunks == 0:
                if thread != 0:
                    end = wait(ctl, thread, done, stamp + 1, generation, SERIAL_POLLS, prefetch)
                    if end == OVER:
                        return phases, 0
                    if end == COMPLETE:
                        continue
                if take_chunk(done + 64, generation, 1) == 0:
                    i64p(own)[HOLDS_CHUNK] = 1
                    run_serial(phase, scratch)
                    i64p(own)[HOLDS_CHUNK] = 0
                    finished = 1
            else:
                for turn in range(n_threads):
                    owner = (thread + turn) % n_threads
                    first = chunks * owner // n_threads
                    most = chunks * (owner + 1) // n_threads - first
                    while most > 0:
                        chunk = take_chunk(done + 64 + owner * 64, generation, most)
                        if chunk < 0:
                            break
                        i64p(own)[HOLDS_CHUNK] = 1
                        run_chunk(phase, first + chunk, scratch, chunk == most - 1, prefetch[0])
                        i64p(own)[HOLDS_CHUNK] = 0
                        finished += 1
            counted = finished == 0
            while not counted:
                word = atomic_load(done)
                count = word & COUNT_MASK if (word >> COUNT_BITS) == generation else 0
                counted = compare_and_swap(done, word, stamp + count + finished) != 0
            if was_migrated(own, generation):
                finish_migration(ctl, thread, generation)
            complete = stamp + max(chunks, 1)
            if wait(ctl, thread, done, complete, generation, -1, prefetch) == OVER:
                return phases, 0
            if timed and thread == 0:
                read_clock(CLOCK, phase + END_TIME * 8)
        return phases, n

    return run_phases, run_serial


@njit(forceinline=True)
def prefetch_first(ctl, generation, thread, phases, n):
    """Prefetch this thread's first weights of these phases, until the next step begins."""
    n_threads, remaining = i64p(ctl)[N_THREADS], i64p(ctl)[IDLE_PREFETCH_NBYTES]
    for i in range(n):
        first, count, chunks = i64p(phases + i * 64)[0], i64p(phases + i * 64)[1], i64p(phases + i * 64)[2]
        begin, end = chunks * thread // n_threads, chunks * (thread + 1) // n_threads
        for at in range(first, first + count * 64, 64):
            task = i64p(at)
            address, stop = task[5] + max(begin, 0) * task[6], task[5] + min(end, task[4]) * task[6]
            begin, end = begin - task[4], end - task[4]
            while address < stop:
                if atomic_load(ctl) != generation or remaining <= 0:
                    return
                for _ in range(PREFETCH_LINES):
                    prefetch_l2(address)
                    address += 64
                remaining -= PREFETCH_LINES * 64


@kernel("step")
def step(clock=""):
    """f(ctl, n_threads, pipes): run the published phases as thread 0, on `n_threads` threads.

    `pipes` holds each worker's write end."""
    timed = clock == "timed"
    run_phases, run_serial = _phase_runner(timed)

    def run(ctl, n_threads, pipes, _unused):
        c = i64p(ctl)
        phases, n = c[NEXT_PHASES], c[NEXT_N_PHASES]
        if n_threads == 1:
            for i in range(n):
                run_serial(phases + i * 64, c[SCRATCH])
                if timed:
                    read_clock(CLOCK, phases + i * 64 + END_TIME * 8)
            return
        generation = atomic_load(ctl) + 1
        c[N_ACTIVE] = n_threads
        atomic_store(ctl + PHASES * 8, phases)
        atomic_store(ctl + N_PHASES * 8, (generation << COUNT_BITS) + n)
        atomic_store(ctl, generation)
        for w in range(1, n_threads):
            if atomic_exchange(ctl + (THREADS + LINE * w + PARKED) * 8, 0) == 1:
                write_fd(i64p(pipes)[w], ctl, 1)
        run_phases(ctl, generation, 0)
        atomic_store(ctl + N_PHASES * 8, generation << COUNT_BITS)  # a late waker finds nothing

    run.signature = types.void(*[types.int64] * 4)
    return run


@kernel("worker")
def worker():
    """f(ctl, thread, pipe, spins): worker loop until the stop flag; parks after `spins` empty polls."""
    run_phases, _ = _phase_runner()

    def run(ctl, thread, pipe, spins):
        last = atomic_load(ctl)
        parked = ctl + (THREADS + LINE * thread + PARKED) * 8
        idle = 0
        while True:
            atomic_add(ctl + INSIDE * 8, 1)
            generation = atomic_load(ctl)
            stop = atomic_load(ctl + STOP * 8)
            if generation != last and stop == 0:
                last = generation
                if thread < i64p(ctl)[N_ACTIVE]:
                    phases, n = run_phases(ctl, generation, thread)
                    prefetch_first(ctl, generation, thread, phases, n)
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
                continue  # no thread saw this one parked: no byte is on its way
            read_fd(pipe, ctl + (THREADS + LINE * thread + PIPE_BYTE) * 8, 1)

    run.signature = types.void(*[types.int64] * 4)
    return run

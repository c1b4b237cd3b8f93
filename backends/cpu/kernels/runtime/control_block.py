"""Control block and task records that the worker pool and the step loop share.

The control block has one 64-byte line for each group of words below; a name is the word's index. A
thread's line holds its own state, and its scratch memory is preceded by two words for the kernels.

Records have 8 words.

    phase   address of its first task, number of tasks, chunks of them all (0: a serial phase),
            three unused, and its end: seconds and nanoseconds of the monotonic clock, written by
            `step:timed` only
    task    function, argument block, end of its units, grain, chunks, address and bytes of the
            weights that its first chunk prefetches (the next chunk's follow; 0: none), first unit
"""

from __future__ import annotations

GENERATION = 0  # number of the running step
PHASES, NEXT_PHASES = 8, 9  # address of the phases: of this step, of the next one
# their number; this step's carries the generation, 0 between steps
N_PHASES, NEXT_N_PHASES = 16, 17
SCRATCH, SCRATCH_NBYTES = 24, 32  # address of all threads' scratch memory, bytes of one thread's
COUNTERS = 40  # address: a line for each phase's finished chunks, and one for each thread's part
N_THREADS = 41
IDLE_PREFETCH_NBYTES = 42  # weights that a worker prefetches between steps
N_ACTIVE = 43  # threads that take part in this step
MASKS = 44  # address of the CPU masks of stall_rescue.py
STOP = 48  # flag: workers exit
INSIDE = 56  # threads inside a step
THREADS = 64  # first line of the threads
N_WORDS = 64  # without the threads' lines

# words of a thread's line
PARKED = 0  # the worker sleeps on its pipe
PIPE_BYTE = 1  # receives the byte that wakes it
HOLDS_CHUNK = 2
NATIVE_ID = 3
CPU_TIME = 4  # two words: its CPU clock at the last check
MIGRATED = 6  # step in which it was migrated to another core

LINE = 8  # words of a line
END_TIME = 6  # word of a phase's record
MASK_NBYTES = 128  # of a CPU mask: two for thread 0, two for the first worker

# bytes before a thread's scratch memory
NEXT_WEIGHTS = 8  # address that it prefetches after this chunk; 0: what follows the chunk's own
SHARED_MEMORY = 16  # address of the memory that all threads share

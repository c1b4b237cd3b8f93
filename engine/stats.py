"""Statistics: counters, gauges and latency histograms behind /metrics."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from logitless.graph.execution.expert_cache import CacheUse


@dataclass(slots=True)
class SchedulerStats:
    """Scheduler totals since the start, and gauges as of the last change."""

    prompt_tokens: int = 0  # prompt tokens computed for the first time
    prompt_tokens_cached: int = 0  # prompt tokens from the prefix cache
    recomputed_tokens: int = 0  # tokens recomputed after a preemption
    prompt_seconds: float = 0.0
    tokens_predicted: int = 0
    tokens_decoded: int = 0  # of these, all but each sequence's first: they cost decode steps
    predicted_seconds: float = 0.0  # of the decode steps
    n_decode: int = 0  # device runs that succeeded
    n_failed_steps: int = 0
    busy_slots: int = 0  # sequences in a batch, summed over device runs
    preemptions: int = 0
    bytes_read: int = 0  # from the device
    bytes_written: int = 0  # to the device
    devices_lost: int = 0
    ops_rerouted: int = 0  # ops that failed a device's self-test and run elsewhere
    drafts: int = 0  # drafts verified
    draft_tokens: int = 0  # their tokens
    draft_tokens_accepted: int = 0  # of these, the accepted ones
    # accepted draft tokens by their position in the draft
    accepted_at: list[int] = field(default_factory=list)
    n_tokens_max: int = 0  # tokens of the longest sequence so far
    requests_processing: int = 0
    requests_deferred: int = 0
    kv_pages_used: int = 0  # blocks of sequences and of cached prefixes
    kv_pages_cached: int = 0  # idle blocks: only cached prefixes use them
    kv_pages_free: int = 0
    host_bytes: int = 0  # bytes of blocks in host memory
    host_pages_saved: int = 0  # blocks copied to host memory
    host_pages_restored: int = 0  # blocks copied back, from the disk, too
    disk_bytes: int = 0  # bytes of the files of --cache-disk, all processes'
    disk_pages_saved: int = 0  # blocks and states written there
    disk_pages_restored: int = 0  # blocks and states read there
    disk_bytes_read: int = 0
    experts: CacheUse = field(default_factory=CacheUse)

    def count_draft(self, n_drafted: int, n_accepted: int) -> None:
        """Count a draft whose first `n_accepted` tokens were accepted."""
        self.drafts += 1
        self.draft_tokens += n_drafted
        self.draft_tokens_accepted += n_accepted
        self.accepted_at += [0] * (n_accepted - len(self.accepted_at))
        for position in range(n_accepted):
            self.accepted_at[position] += 1


@dataclass(slots=True)
class TrainingStats:
    """Totals of fine-tuning jobs since the start, and progress of the latest job."""

    jobs_running: int = 0  # 1 while a job has the device
    steps: int = 0  # optimizer steps of all jobs
    tokens: int = 0
    step: int = 0  # optimizer steps of the latest job
    n_steps: int = 0  # all optimizer steps of that job
    loss: float | None = None  # training loss of its last step
    valid_loss: float | None = None  # loss of its last validation


# seconds
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Histogram of durations. One thread observes, others may read."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Cumulative buckets for Prometheus: (upper bound, count up to it)."""
        running, pairs = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


class Latencies:
    """Latency histograms of requests and steps."""

    def __init__(self) -> None:
        self.first_token = Histogram()
        self.inter_token = Histogram()
        self.queue = Histogram()
        self.step = Histogram()

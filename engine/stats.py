"""What the scheduler counts: the numbers behind /metrics."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start, and gauges as they were after the last change."""

    prompt_tokens: int = 0  # of prompts, evaluated for the first time
    prompt_tokens_cached: int = 0  # of prompts, taken from the cache
    recomputed_tokens: int = 0  # evaluated again because their sequence was preempted
    prompt_seconds: float = 0.0
    tokens_predicted: int = 0
    predicted_seconds: float = 0.0
    n_decode: int = 0  # device runs that succeeded
    n_failed_steps: int = 0
    busy_slots: int = 0  # sequences in a batch, summed over device runs
    preemptions: int = 0
    bytes_read: int = 0  # that came back from the device
    bytes_written: int = 0  # that went there
    devices_lost: int = 0
    ops_rerouted: int = 0  # ops that a device computes wrongly and another does
    draft_tokens: int = 0  # guessed and tried
    draft_tokens_accepted: int = 0  # of these, what the model chose too
    n_tokens_max: int = 0  # the longest sequence so far
    requests_processing: int = 0
    requests_deferred: int = 0
    kv_pages_used: int = 0  # by sequences and by cached prefixes
    kv_pages_cached: int = 0  # of these, by prefixes that no sequence needs
    kv_pages_free: int = 0
    sleeping: int = 0  # 1 while the model is not in memory
    host_bytes: int = 0  # of pages in host memory
    host_pages_saved: int = 0  # pages that went there, ever
    host_pages_restored: int = 0  # and came back


@dataclass(slots=True)
class TrainingStats:
    """What fine-tuning jobs did since the start, and where the one that was last at work is."""

    jobs_running: int = 0  # 1 while a job has the device
    steps: int = 0  # of the optimizer
    tokens: int = 0
    step: int = 0  # of the job
    n_steps: int = 0  # of the job, in all
    loss: float | None = None  # of the job's last step
    valid_loss: float | None = None  # of the job's last validation


BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class Histogram:
    """Counts of durations by bucket. One thread observes, others may read."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, count up to it), as Prometheus wants them."""
        running, pairs = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


class Latencies:
    """Where the seconds of requests go."""

    def __init__(self) -> None:
        self.first_token = Histogram()
        self.inter_token = Histogram()
        self.queue = Histogram()
        self.step = Histogram()

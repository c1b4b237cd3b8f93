"""What the scheduler counts: the numbers behind /metrics."""

from __future__ import annotations

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

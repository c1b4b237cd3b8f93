"""Scheduler: admission, chunked prefill within a prefill budget, batch builder, output processor,
preemption."""

"""Scheduler: admission, prefill budget, batch builder, output processor, preemption."""

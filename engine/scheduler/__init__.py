"""Scheduler of continuous batching: admission, prefill budget, batch builder, output processor, preemption."""

"""Attention ops: paged attention over the KV cache, causal attention, MLA, attention sinks."""

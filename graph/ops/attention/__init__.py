"""Attention ops: attention scores over the paged KV cache, causal attention, MLA, attention sinks."""

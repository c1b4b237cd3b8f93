"""GPU attention: attention scores over paged KV blocks, prefill, MLA, backward, KV cache stores."""

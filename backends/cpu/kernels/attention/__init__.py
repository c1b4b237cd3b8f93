"""CPU attention: attention scores over paged KV blocks, prefill tiles, MLA, KV cache stores."""

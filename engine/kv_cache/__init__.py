"""KV cache: manager, block pool, prefix cache, host offload, sliding windows, slot files.

No tensors."""

"""The headless engine: scheduler, KV cache, model runner, sampling, speculative decoding, fine-tuning jobs."""

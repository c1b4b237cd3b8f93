"""Headless engine: scheduler, KV cache, model runner, sampling, speculation, fine-tuning jobs."""

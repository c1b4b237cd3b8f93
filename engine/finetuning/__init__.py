"""Fine-tuning jobs between the steps of requests: job store, worker, checkpoints."""

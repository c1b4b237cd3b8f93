"""`logitless bench`: speed of prefill and decode against the machine's limits."""

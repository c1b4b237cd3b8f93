"""The worker pool: threads, CPU affinity, timers, measured peaks."""

"""The thread pool: threads, CPU affinity, timers, measured peaks."""

"""The step loop of the worker threads, and kernels that measure the machine's peaks."""

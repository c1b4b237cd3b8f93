"""Commands about this machine: its devices, their kernels, and its state."""

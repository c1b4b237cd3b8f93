"""Kernels for OpenCL and Vulkan devices that are CPUs (PoCL, lavapipe)."""

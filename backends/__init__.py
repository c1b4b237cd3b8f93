"""Backends: CPU kernels, GPU kernels for OpenCL and Vulkan, remote devices (RPC)."""

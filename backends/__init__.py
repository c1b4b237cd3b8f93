"""Backends: how ops run on a device. CPU kernels, GPU kernels for OpenCL and Vulkan, remote
devices.
"""

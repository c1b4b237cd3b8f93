"""Vulkan backend: devices, command buffers recorded once per program, shipped SPIR-V shaders."""

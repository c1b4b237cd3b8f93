"""OpenCL backend. Nothing here is imported before a device is requested."""

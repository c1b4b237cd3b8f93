"""OpenCL backend, imported only when one of its devices is requested."""

"""The kernel language: a subset of C that is rendered to OpenCL C and GLSL."""

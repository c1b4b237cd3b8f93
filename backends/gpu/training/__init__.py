"""GPU kernels of training: losses, optimizer step, convolution."""

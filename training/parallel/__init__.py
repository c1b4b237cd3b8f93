"""Data-parallel training: gradients by several processes, summed in the order of one."""

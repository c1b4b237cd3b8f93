"""Encoders of images that are no transformer of patches, or not only one."""

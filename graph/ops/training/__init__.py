"""Losses and the optimizer step as ops."""

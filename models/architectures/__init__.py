"""Architectures: the decoder's layers (attention, RoPE, feed-forward, MoE, MLA, SSM) and their
registry."""

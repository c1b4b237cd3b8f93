"""Architectures: the decoder's layers (attention, RoPE, FFN, MoE, MLA, SSM) and their registry."""

"""Drafters: small networks in files of their own that draft from a model's hidden states."""

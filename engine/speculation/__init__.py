"""Speculative decoding: draft tokens from n-grams, a draft model, the MTP head or the client."""

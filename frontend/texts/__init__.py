"""Requests about texts without a conversation: vectors, scores, infill and the check of a draft."""

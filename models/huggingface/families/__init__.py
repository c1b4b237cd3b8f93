"""Families of Hugging Face's models."""

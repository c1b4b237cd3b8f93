"""Sampling parameters, random numbers, penalties, grammar mask, stop strings, reasoning budget."""

"""Requests of the server itself, to addresses that its clients name."""

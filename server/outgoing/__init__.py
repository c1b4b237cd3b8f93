"""Outgoing requests of the server, to addresses that its clients name."""

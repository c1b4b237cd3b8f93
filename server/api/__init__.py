"""Handlers of the HTTP endpoints, and how results become replies."""

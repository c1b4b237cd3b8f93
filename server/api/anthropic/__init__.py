"""Handlers of Anthropic's API."""

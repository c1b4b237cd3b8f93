"""Commands for Ray clusters."""

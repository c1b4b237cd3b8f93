"""Tool calls and reasoning in a model's answer."""

"""Graders of reinforcement learning: rewards for answers, as in OpenAI's API."""

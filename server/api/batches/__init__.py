"""Batches: requests in files, answered with the lowest priority, in OpenAI's and Anthropic's API."""

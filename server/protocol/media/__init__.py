"""Media of requests: images in messages and prompts."""

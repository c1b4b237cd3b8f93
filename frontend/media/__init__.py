"""Media of requests: images and sounds in messages and prompts."""

"""Media: images and sounds in prompts, by one way."""

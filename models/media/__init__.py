"""Media of prompts: images and sounds as tiles, and the encoders of a projector file."""

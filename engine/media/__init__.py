"""Media of requests: tiles, their rows on the device, the encoders' runs."""

"""Images of requests: tiles, their rows on the device, the encoder's runs."""

"""Programs that train small things in seconds, on the same graph."""

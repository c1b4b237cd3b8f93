"""The web page at /."""

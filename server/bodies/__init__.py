"""Request bodies: read in bounds of bytes, time and memory, unpacked, and parsed as JSON."""

"""Example programs: small networks that train in seconds on the same graph."""

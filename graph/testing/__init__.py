"""Conformance: every op's cases on a backend against the float64 reference."""

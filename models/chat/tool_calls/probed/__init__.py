"""Tool-call formats read from a template's own rendering of calls."""

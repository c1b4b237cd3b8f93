"""Flags of every command as declarations, their parser and the help text."""

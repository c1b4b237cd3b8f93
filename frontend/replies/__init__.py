"""Replies: the events of a job become the answer of an API, whole or as a stream."""

"""Request bodies: from JSON to typed requests; each refusal names its field."""

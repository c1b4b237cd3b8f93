"""Training methods: losses over the log-probabilities of token rows."""

"""From parsed flags to an engine, a server or a training run."""

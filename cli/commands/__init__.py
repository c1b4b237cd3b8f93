"""The commands of `logitless`: each module has `run(options)`."""

"""The command line `logitless`: commands, flags, model downloads, setup."""

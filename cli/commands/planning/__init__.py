"""`logitless plan`: memory and placement of serving and training, measured by a dry run."""

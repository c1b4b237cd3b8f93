"""Small networks that learn in seconds on logitless' graph, devices and optimizers."""

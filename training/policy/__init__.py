"""Learning a policy from rewards: its forward pass as the server has it, and the training loop."""

"""Model runner: builds the graph and inputs of a step, compiles plans by batch size, runs them."""

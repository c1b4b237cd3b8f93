"""Router mode: one process that answers for many models, each served by a child process of its own."""

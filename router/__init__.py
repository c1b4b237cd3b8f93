"""Router: one process for many models, each served by a child process."""

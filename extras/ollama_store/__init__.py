"""Models that clients of Ollama's API create in a router: uploads, manifests, and folders of files."""

"""Model downloads: Hugging Face's hub and URLs, resumed and checksummed."""

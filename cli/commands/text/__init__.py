"""Commands that read and write texts: generate, tokenize, batch."""

"""Models: GGUF files, architectures, weights, LoRA adapters, tokenizers, grammars, chat templates."""

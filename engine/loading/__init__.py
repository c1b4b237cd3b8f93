"""Opening a model: options declared once, devices, adapters, draft model, tokenizer, engine."""

"""OpenAI's endpoints: chat, completions, responses, embeddings, files, fine-tuning."""

"""The tokenizer of checkpoints in Hugging Face layout: tokenizer.json and the files next to it."""

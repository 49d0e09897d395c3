"""The tokenizer of checkpoints in Hugging Face layout: tokenizer.json and the files beside it."""

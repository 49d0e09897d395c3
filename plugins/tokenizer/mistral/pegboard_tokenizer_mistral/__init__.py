"""The tokenizer of checkpoints in Mistral's own format: tekken.json or tokenizer.model.v*."""

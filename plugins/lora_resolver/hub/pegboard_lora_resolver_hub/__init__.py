"""The LoRA resolver for adapters on the Hugging Face Hub."""

"""The LoRA resolver for a folder of adapters."""

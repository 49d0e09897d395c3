"""LoRA resolver: a JSON file says which folder an adapter's name means."""

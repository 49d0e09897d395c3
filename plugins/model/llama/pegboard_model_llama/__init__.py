"""Llama-shaped decoder models: one file serves Llama, Mistral, Qwen2, Qwen3 and SmolLM."""

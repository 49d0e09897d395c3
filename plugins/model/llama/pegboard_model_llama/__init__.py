"""Llama-shaped decoder models: Llama, Mistral, Qwen2, Qwen3 and SmolLM, and Mixtral, Qwen MoE and
OLMoE with experts."""

"""The OpenAI HTTP API for Pegboard: chat completions, completions and models."""

"""What a program calls: `LLM`, `AsyncLLM`, `LLMEngine`. Text in, text out."""

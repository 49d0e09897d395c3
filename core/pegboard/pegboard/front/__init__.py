"""The classes that programs use: `LLM`, `AsyncLLM` and `LLMEngine`. They take text and return
text."""

"""LLaVA: language models that read images and videos."""

"""DeepSeek-VL2: language models that read images."""

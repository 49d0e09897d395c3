"""DeepSeek-VL2 and DeepSeek-OCR: language models that read images."""

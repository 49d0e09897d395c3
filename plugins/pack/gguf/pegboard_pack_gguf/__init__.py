"""GGUF for Pegboard: a weight loader, a quantization method and a tokenizer for one file format."""

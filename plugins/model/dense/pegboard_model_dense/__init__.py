"""Decoder models that differ from Llama in names of tensors, norms, biases, factors, rotary
embeddings or experts."""

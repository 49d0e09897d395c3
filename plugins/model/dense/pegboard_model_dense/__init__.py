"""Decoder models described by data: names of tensors, norms, biases, scales, rotary embeddings,
experts."""

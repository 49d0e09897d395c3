"""The logits processor `top_n_sigma`."""

"""Sampler `torch`: logits to token ids with torch operators."""

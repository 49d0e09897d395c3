"""Molmo: a language model that reads images in crops that overlap."""

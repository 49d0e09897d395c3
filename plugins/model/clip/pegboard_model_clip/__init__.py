"""CLIP: vectors of texts and images."""

"""InternVL: language models that read images."""

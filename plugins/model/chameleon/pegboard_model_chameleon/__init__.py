"""Chameleon: a language model whose vocabulary has tokens of images."""

"""Aria: a language model that reads images."""

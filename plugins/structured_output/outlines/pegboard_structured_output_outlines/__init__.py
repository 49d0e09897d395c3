"""Structured output `outlines`: regular expressions as automata over tokens, with outlines-core."""

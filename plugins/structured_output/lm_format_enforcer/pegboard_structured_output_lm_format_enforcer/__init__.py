"""Structured output `lm-format-enforcer`: character by character, with lm-format-enforcer."""

"""Logits processors against repetition: an output ends, or n tokens come only once."""

"""Structured output: grammars are compiled in threads, and masks are filled while the forward
runs."""

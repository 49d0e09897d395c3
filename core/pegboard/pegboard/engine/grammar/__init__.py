"""Structured output: grammars are compiled in threads, masks are filled while the forward runs."""

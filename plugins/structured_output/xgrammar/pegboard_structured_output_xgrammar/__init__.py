"""Structured output `xgrammar`: grammars compiled to pushdown automata, with xgrammar."""

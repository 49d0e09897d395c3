"""Structured output `guidance`: JSON Schema, regular expressions and Lark grammars, with
llguidance."""

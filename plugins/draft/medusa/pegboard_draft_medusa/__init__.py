"""Draft plugin `medusa`: proposes the tokens of several heads, one for each place."""

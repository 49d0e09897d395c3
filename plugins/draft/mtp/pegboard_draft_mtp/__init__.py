"""Draft plugin `mtp`: proposes the tokens of the layers that predict several tokens."""

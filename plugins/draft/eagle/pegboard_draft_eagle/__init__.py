"""Draft plugins `eagle` and `eagle3`: propose the tokens of a head that reads hidden states."""

"""Draft plugin `draft_model`: proposes the tokens of a smaller model."""

"""The model source for ModelScope."""

"""From a model reference to an engine plan: files, checkpoint, choices. No torch, no weights."""

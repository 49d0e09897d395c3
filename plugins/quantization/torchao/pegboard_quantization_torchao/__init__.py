"""torchao checkpoints."""

"""HQQ checkpoints."""

"""AWQ checkpoints (Lin et al. 2023)."""

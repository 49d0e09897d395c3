"""AMD Quark checkpoints."""

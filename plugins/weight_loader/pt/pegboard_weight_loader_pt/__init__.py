"""Checkpoints that torch.save has written, and mapped numpy copies of them."""

"""What plugins for quantized checkpoints share. Import from the submodules."""

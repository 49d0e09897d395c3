"""bitsandbytes checkpoints."""

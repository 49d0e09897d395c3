"""Collective plugins `gloo` and `nccl`: ranks exchange tensors with torch's process groups."""

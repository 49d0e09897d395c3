"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.weight_loader import WeightLoaderSpec

PT = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_pt.loader:PickledLoader",
    file_patterns=("*.bin", "*.pt", "*.pth"),
    tier="reference",  # safetensors files are preferred where a folder has both
)

NPCACHE = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_pt.numpy_copies:NumpyCopiesLoader",
)
"""Only chosen by name, because it writes a copy of the model."""

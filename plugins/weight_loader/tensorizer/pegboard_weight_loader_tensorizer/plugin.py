"""The spec of this package."""

from __future__ import annotations

from pegboard.interfaces.weight_loader import WeightLoaderSpec

TENSORIZER = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_tensorizer.loader:TensorizerLoader",
    probe="pegboard_weight_loader_tensorizer.probe:probe",
    file_patterns=("*.tensors",),
    magic=b"|TZR|",
    tier="reference",  # safetensors files are preferred where a folder has both
)

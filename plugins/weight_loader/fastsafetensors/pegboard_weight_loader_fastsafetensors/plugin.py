"""The spec of this package."""

from __future__ import annotations

from pegboard.interfaces.weight_loader import WeightLoaderSpec

FASTSAFETENSORS = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_fastsafetensors.loader:FastSafetensorsLoader",
    probe="pegboard_weight_loader_fastsafetensors.probe:probe",
)

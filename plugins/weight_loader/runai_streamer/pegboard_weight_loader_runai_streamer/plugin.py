"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.weight_loader import WeightLoaderSpec

RUNAI_STREAMER = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_runai_streamer.loader:StreamerLoader",
    probe="pegboard_weight_loader_runai_streamer.probe:probe",
)

RUNAI_STREAMER_SHARDED = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_runai_streamer.loader:ShardedStreamerLoader",
    probe="pegboard_weight_loader_runai_streamer.probe:probe",
)

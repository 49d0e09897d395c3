"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.weight_loader import WeightLoaderSpec

SAFETENSORS = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_safetensors.loader:SafetensorsLoader",
    file_patterns=("*.safetensors",),
    adapters="pegboard_weight_loader_safetensors.adapters:read_adapter",
)

DUMMY = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_safetensors.dummy:DummyLoader",
)

SHARDED_STATE = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_safetensors.sharded:ShardedStateLoader",
    file_patterns=("sharded_state.json",),
    flags=frozenset({"shares"}),
    tier="tuned",  # such a folder has safetensors files, which `safetensors` would not understand
    adapters="pegboard_weight_loader_safetensors.adapters:read_adapter",
)

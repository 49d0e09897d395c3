"""The spec of the platform `slice`. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.platform import PlatformSpec

SLICE = PlatformSpec(
    api="1.0",
    implementation="pegboard_platform_slice.platform:SlicePlatform",
    options="pegboard_platform_slice.options:SliceOptions",
    probe="pegboard_platform_slice.probe:probe",
    tier="reference",
    runs=frozenset({"cpu"}),  # its tensors are in the host's memory, so plugins for "cpu" run on it
)

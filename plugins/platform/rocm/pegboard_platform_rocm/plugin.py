"""Specs of this package."""

from pegboard.interfaces.platform import PlatformSpec

ROCM = PlatformSpec(
    api="1.0",
    implementation="pegboard_platform_rocm.platform:ROCmPlatform",
    probe="pegboard_platform_rocm.probe:probe",
    tier="vendor",
    flags=frozenset({"device"}),
)
"""A GPU is preferred to the CPU."""

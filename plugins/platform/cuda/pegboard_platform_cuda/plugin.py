"""Specs of this package."""

from pegboard.interfaces.platform import PlatformSpec

CUDA = PlatformSpec(
    api="1.0",
    implementation="pegboard_platform_cuda.platform:CUDAPlatform",
    probe="pegboard_platform_cuda.probe:probe",
    tier="vendor",
    flags=frozenset({"device"}),
)
"""A GPU is preferred to the CPU."""

"""Specs of this package."""

from pegboard.interfaces.platform import PlatformSpec

CPU = PlatformSpec(
    api="1.0",
    implementation="pegboard_platform_cpu.platform:CPUPlatform",
    probe="pegboard_platform_cpu.probe:probe",
    tier="reference",
)

"""Spec of the executor plugin `ray`."""

from __future__ import annotations

from pegboard.interfaces.executor import ExecutorSpec

RAY = ExecutorSpec(
    api="1.0",
    implementation="pegboard_executor_ray.executor:RayExecutor",
    options="pegboard_executor_ray.options:RayOptions",
    launcher="pegboard_executor_ray.engines:RayLauncher",
    probe="pegboard_executor_ray.probe:probe",
    supports={"ranks": True},
)

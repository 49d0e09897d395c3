"""Specs of this package."""

from pegboard.interfaces.executor import ExecutorSpec

UNI = ExecutorSpec(
    api="1.0",
    implementation="pegboard_executor_local.in_process:InProcessExecutor",
)

MP = ExecutorSpec(
    api="1.0",
    implementation="pegboard_executor_local.processes:ProcessExecutor",
    supports={"ranks": True},
    tier="tuned",
)

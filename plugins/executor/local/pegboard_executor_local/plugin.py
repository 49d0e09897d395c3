"""Specs of this package."""

from pegboard.interfaces.executor import ExecutorSpec

UNI = ExecutorSpec(
    api="1.0",
    implementation="pegboard_executor_local.in_process:InProcessExecutor",
)

EXTERNAL_LAUNCHER = ExecutorSpec(
    api="1.0",
    implementation="pegboard_executor_local.launched:LaunchedExecutor",
    supports={"ranks": True},
    flags=frozenset({"engine_per_rank"}),
)

MP = ExecutorSpec(
    api="1.0",
    implementation="pegboard_executor_local.processes:ProcessExecutor",
    host="pegboard_executor_local.headless:run_host",
    supports={"ranks": True, "hosts": True},
    tier="tuned",
)

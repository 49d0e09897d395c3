"""Spec of the command `run-batch`."""

from __future__ import annotations

from pegboard.interfaces.command import CommandSpec

RUN_BATCH = CommandSpec(api="1.0", implementation="pegboard_command_run_batch.command:RunBatch")

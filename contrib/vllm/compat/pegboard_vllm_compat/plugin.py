"""The specs of this package. Their module imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.command import CommandSpec

COMMAND = CommandSpec(api="1.0", implementation="pegboard_vllm_compat.command:VllmCommand")

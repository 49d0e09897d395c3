"""Spec of the command `bench`."""

from __future__ import annotations

from pegboard.interfaces.command import CommandSpec

BENCH = CommandSpec(api="1.0", implementation="pegboard_command_bench.command:Bench")

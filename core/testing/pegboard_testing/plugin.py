"""Specs of the commands for plugin authors."""

from __future__ import annotations

from pegboard.interfaces.command import CommandSpec

NEW = CommandSpec(api="1.0", implementation="pegboard_testing.authoring.scaffold:New")

TEST = CommandSpec(api="1.0", implementation="pegboard_testing.authoring.conformance:Conformance")

COMPAT = CommandSpec(api="1.0", implementation="pegboard_testing.authoring.compat:Compat")

RECORD = CommandSpec(api="1.0", implementation="pegboard_testing.authoring.streams:Record")

REPLAY = CommandSpec(api="1.0", implementation="pegboard_testing.authoring.streams:Replay")

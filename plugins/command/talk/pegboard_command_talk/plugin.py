"""Specs of the commands `chat` and `complete`."""

from __future__ import annotations

from pegboard.interfaces.command import CommandSpec

CHAT = CommandSpec(api="1.0", implementation="pegboard_command_talk.command:ChatCommand")
COMPLETE = CommandSpec(api="1.0", implementation="pegboard_command_talk.command:CompleteCommand")

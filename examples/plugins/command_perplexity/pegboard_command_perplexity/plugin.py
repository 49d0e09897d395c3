"""The spec. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.command import CommandSpec

PERPLEXITY = CommandSpec(api="1.0", implementation="pegboard_command_perplexity.command:Perplexity")

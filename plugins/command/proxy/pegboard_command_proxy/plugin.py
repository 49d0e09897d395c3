"""Spec of the command `proxy`."""

from __future__ import annotations

from pegboard.interfaces.command import CommandSpec

PROXY = CommandSpec(api="1.0", implementation="pegboard_command_proxy.command:Proxy")

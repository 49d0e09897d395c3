"""Spec of the command `serve`."""

from __future__ import annotations

from pegboard.interfaces.command import CommandSpec

SERVE = CommandSpec(api="1.0", implementation="pegboard_server.serve:Serve")

"""Logging: one format, one root logger `pegboard`, set up once per process by the program (never by the library)."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(levelname).1s %(asctime)s %(name)s] %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Logger below `pegboard`; plugin modules `pegboard_x_y` log as `pegboard.x_y`."""
    if name.startswith("pegboard_"):
        name = "pegboard." + name.removeprefix("pegboard_")
    return logging.getLogger(name)


def set_up_logging(level: str, role: str = "") -> None:
    """Send records of `pegboard` to stderr. `role` (engine, api, …) is shown at the start of every line of a child process."""
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"({role}) " if role else ""
    handler.setFormatter(logging.Formatter(prefix + FORMAT, datefmt="%m-%d %H:%M:%S"))
    root = logging.getLogger("pegboard")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False

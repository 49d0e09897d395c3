"""Logging with one format and one root logger, `pegboard`. The program sets it up once per process;
the library never does."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(levelname).1s %(asctime)s %(name)s] %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return a logger below `pegboard`. A plugin module `pegboard_x_y` logs as `pegboard.x_y`."""
    if name.startswith("pegboard_"):
        name = "pegboard." + name.removeprefix("pegboard_")
    return logging.getLogger(name)


def set_up_logging(level: str, role: str = "") -> None:
    """Send the records of `pegboard` to stderr. In a child process every line starts with its
    `role` (engine, api, …)."""
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"({role}) " if role else ""
    handler.setFormatter(logging.Formatter(prefix + FORMAT, datefmt="%m-%d %H:%M:%S"))
    root = logging.getLogger("pegboard")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False

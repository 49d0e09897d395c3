"""Shared code of the measurements: engine flags, percentiles, and results as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pegboard.errors import PegboardError
from pegboard.interfaces.command import CommandSetup, FlagParser

PERCENTAGES = (10, 25, 50, 75, 90, 99)


def engine_parser(setup: CommandSetup, what: str, description: str) -> FlagParser:
    """Returns a parser with the engine's flags. The caller adds the flags of the measurement."""
    parser = setup.parser(
        prog=f"pegboard bench {what}",
        usage=f"pegboard bench {what} [MODEL] [--FLAG VALUE ...] [--SETTING VALUE ...]",
        description=description,
    )
    parser.add_argument("--output-json", metavar="FILE", help="also write the result to this file")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_settings("engine", "plugins")
    return parser


def percentiles(
    values: Sequence[float], percentages: Sequence[float] = PERCENTAGES
) -> dict[str, float]:
    """Returns the percentiles as {"50": …}, linearly interpolated; all are zero when there are no
    values."""
    numbers = np.percentile(values, percentages) if len(values) else np.zeros(len(percentages))
    return {percent_name(p): float(value) for p, value in zip(percentages, numbers, strict=True)}


def percent_name(percentage: float) -> str:
    """99.0 → "99", 99.9 → "99.9"."""
    return str(int(percentage)) if percentage == int(percentage) else str(percentage)


def write_json(path: str, result: Any) -> None:
    """Write the result as JSON. Raises PegboardError when the file cannot be written."""
    try:
        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=4) + "\n", "utf-8")
    except OSError as error:
        raise PegboardError(f"cannot write {path}: {error.strerror or error}") from error

"""`pegboard bench sweep plot` and `plot_pareto`: pictures of a sweep's results, by matplotlib."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pegboard.errors import PegboardError, UsageError, did_you_mean
from pegboard.interfaces.command import CommandSetup, FlagParser

Row = Mapping[str, Any]
Point = tuple[float, float]


def _parser(setup: CommandSetup, action: str, description: str) -> FlagParser:
    parser = setup.parser(prog=f"pegboard bench sweep {action}", description=description)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="of a sweep, with its summary.json"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=f"PNG, SVG or PDF (default: {action}.png there)"
    )
    return parser


def plot(words: Sequence[str], setup: CommandSetup) -> int:
    """Draw a field of the results over a parameter: the median of the runs, as a line for each
    value of another parameter."""
    parser = _parser(setup, "plot", "Draw a result over a parameter: the median of the runs.")
    parser.add_argument("--var-x", default="max_concurrency", help="(default %(default)s)")
    parser.add_argument("--var-y", default="p99_ttft_ms", help="(default %(default)s)")
    parser.add_argument("--curve-by", metavar="NAME", help="a parameter: one line for each value")
    parser.add_argument("--scale-x", choices=("linear", "log"), default="linear")
    parser.add_argument("--scale-y", choices=("linear", "log"), default="linear")
    arguments = parser.parse(words)
    rows = read(arguments.folder)
    curves: dict[str, list[Row]] = {}
    for row in rows:
        by = arguments.curve_by
        curves.setdefault(f"{by}={_field(row, by)}" if by else "", []).append(row)
    lines = {
        name: points(group, arguments.var_x, arguments.var_y) for name, group in curves.items()
    }
    figure, axes = _figure(arguments.var_x, arguments.var_y)
    axes.set_xscale(arguments.scale_x)
    axes.set_yscale(arguments.scale_y)
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), marker="o", label=name)
    return _save(figure, axes, arguments, "plot", any(lines))


def plot_pareto(words: Sequence[str], setup: CommandSetup) -> int:
    """Draw output tokens per second of a device over those of a user. The line joins the
    combinations that no other one beats in both."""
    parser = _parser(setup, "plot_pareto", "Draw the throughput of a device over that of a user.")
    parser.add_argument(
        "--user-count-var", default="max_concurrency", help="users at once (default %(default)s)"
    )
    parser.add_argument(
        "--gpu-count-var", metavar="NAME", help="parameter with the number of devices (default: 1)"
    )
    parser.add_argument(
        "--label-by", metavar="NAME", help="parameter that is written at the points"
    )
    arguments = parser.parse(words)
    rows = read(arguments.folder)
    every = [
        (
            float(_field(row, "output_throughput")) / float(_field(row, arguments.user_count_var)),
            float(_field(row, "output_throughput"))
            / (float(_field(row, arguments.gpu_count_var)) if arguments.gpu_count_var else 1.0),
        )
        for row in rows
    ]
    figure, axes = _figure("output tokens/s per user", "output tokens/s per device")
    axes.plot(*zip(*every, strict=True), "o", color="0.7")
    axes.plot(*zip(*frontier(every), strict=True), "o-")
    if arguments.label_by:
        for row, point in zip(rows, every, strict=True):
            axes.annotate(f"{_field(row, arguments.label_by)}", point)
    return _save(figure, axes, arguments, "plot_pareto", has_legend=False)


def read(folder: Path) -> list[Row]:
    """Return the results of a sweep. Raises UsageError if there are none."""
    file = folder / "summary.json"
    if not file.is_file():
        raise UsageError(f"{file}: there is no such file; expected the folder of a sweep")
    rows: list[Row] = json.loads(file.read_text("utf-8"))
    return rows


def _field(row: Row, name: str) -> Any:
    key = name.replace("-", "_")
    if key not in row:
        raise UsageError(f"the results have no {name!r}{did_you_mean(key, row)}")
    return row[key]


def points(rows: Iterable[Row], x: str, y: str) -> list[Point]:
    """Return the median of y for each value of x, in ascending order."""
    values: dict[float, list[float]] = {}
    for row in rows:
        values.setdefault(float(_field(row, x)), []).append(float(_field(row, y)))
    return [(at, median(values[at])) for at in sorted(values)]


def frontier(every: Iterable[Point]) -> list[Point]:
    """Return the points that no other point beats in both numbers, from left to right."""
    best: list[Point] = []
    for point in sorted(every, reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best[::-1]


def _figure(x: str, y: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PegboardError(
            "drawing needs matplotlib: pip install 'pegboard-command-bench[plot]'"
        ) from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="0.9")
    return figure, axes


def _save(figure: Any, axes: Any, arguments: Namespace, action: str, has_legend: bool) -> int:
    if has_legend:
        axes.legend()
    path = Path(arguments.output or arguments.folder / f"{action}.png")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PegboardError(f"cannot write {path}: {error}") from error
    print(path)
    return 0

"""The numbers as pictures: SVG written as plain strings.

    python tests/bench/plot.py RESULT.json FOLDER

throughput.svg and latency.svg: servers over the number of clients. roofline.svg: decoding of one
stream, tokens per second over the bytes of weights a token reads, with the line that the measured
memory bandwidth draws.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

WIDTH = 640
HEIGHT = 400
LEFT = 70
RIGHT = 190
TOP = 40
BOTTOM = 50
COLORS = ("#c0392b", "#2471a3", "#1e8449", "#b7950b", "#7d3c98", "#515a5a", "#d35400", "#148f77")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """One axis: a label with its unit; a logarithmic scale from low to high, with these ticks."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]

    def place(self, value: float) -> float:
        """The place of a value on the axis: 0 at `low`, 1 at `high`."""
        return math.log(value / self.low) / math.log(self.high / self.low)


@dataclass
class Figure:
    """Lines and marks over two axes, with a legend on the right."""

    title: str
    x: Axis
    y: Axis
    _parts: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str, str]] = field(default_factory=list)

    def line(self, name: str, points: Points, color: str, dashes: str = "none") -> None:
        """Marks joined by a line."""
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/>'
        )
        self._marks(points, color)
        self._legend.append((name, color, dashes))

    def marks(self, name: str, points: Points, color: str) -> None:
        """Marks without a line."""
        self._marks(points, color)
        self._legend.append((name, color, "0 100"))

    def svg(self) -> str:
        """The whole SVG file."""
        font = 'font-family="sans-serif" font-size="12" fill="#333"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" {font}>'
        )
        title = f'<text x="{LEFT}" y="24" font-size="14">{escape(self.title)}</text>'
        white = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        return (
            "\n".join(
                [head, white, title, *self._axes(), *self._parts, *self._legend_parts(), "</svg>"]
            )
            + "\n"
        )

    def _x(self, value: float) -> float:
        return LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - self.y.place(value) * (HEIGHT - TOP - BOTTOM)

    def _marks(self, points: Points, color: str) -> None:
        for x, y in points:
            self._parts.append(
                f'<circle cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="4" fill="{color}"/>'
            )

    def _axes(self) -> Iterable[str]:
        bottom = HEIGHT - BOTTOM
        right = WIDTH - RIGHT
        middle = (HEIGHT - BOTTOM + TOP) / 2
        for tick in self.x.ticks:
            yield (
                f'<line x1="{self._x(tick):.1f}" x2="{self._x(tick):.1f}" y1="{TOP}" '
                f'y2="{bottom}" stroke="#ddd"/>'
            )
            yield (
                f'<text x="{self._x(tick):.1f}" y="{bottom + 16}" '
                f'text-anchor="middle">{tick:g}</text>'
            )
        for tick in self.y.ticks:
            yield (
                f'<line x1="{LEFT}" x2="{right}" y1="{self._y(tick):.1f}" '
                f'y2="{self._y(tick):.1f}" stroke="#ddd"/>'
            )
            yield (
                f'<text x="{LEFT - 6}" y="{self._y(tick) + 4:.1f}" '
                f'text-anchor="end">{tick:g}</text>'
            )
        yield (
            f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" '
            f'text-anchor="middle">{escape(self.x.label)}</text>'
        )
        yield (
            f'<text transform="translate(18 {middle}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y.label)}</text>'
        )

    def _legend_parts(self) -> Iterable[str]:
        x = WIDTH - RIGHT + 12
        for index, (name, color, dashes) in enumerate(self._legend):
            y = TOP + 10 + 20 * index
            stroke = f'stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"'
            yield f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" {stroke}/>'
            yield f'<circle cx="{x + 12}" cy="{y}" r="3" fill="{color}"/>'
            yield f'<text x="{x + 30}" y="{y + 4}">{escape(name)}</text>'


def log_axis(label: str, values: Iterable[float], powers_of_two: bool = False) -> Axis:
    """An axis that holds all values, with ticks at 1, 2, 5, 10 … or at powers of two."""
    known = list(values)
    low = min(known)
    high = max(known)
    if powers_of_two:
        ticks = [
            2.0**power
            for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        ]
    else:
        first = math.floor(math.log10(low))
        last = math.ceil(math.log10(high))
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
        below = [t for t in ticks if t <= low]
        above = [t for t in ticks if t >= high]
        ticks = [tick for tick in ticks if below[-1] <= tick <= above[0]]
    if len(ticks) == 1:
        ticks.append(2 * ticks[0])
    return Axis(label, ticks[0], ticks[-1], ticks)


def throughput(result: Mapping[str, Any]) -> Figure:
    """Plots output tokens per second over the number of clients."""
    curves = _curves(result, "tokens_per_s")
    figure = _over_clients("Throughput of the servers", "output tokens/s", curves)
    for (name, points), color in zip(curves.items(), COLORS, strict=False):
        figure.line(name, points, color)
    return figure


def latency(result: Mapping[str, Any]) -> Figure:
    """Plots the time between tokens over the number of clients: percentiles 50 and 99."""
    middle = _curves(result, "itl_ms_p50")
    late = _curves(result, "itl_ms_p99")
    figure = _over_clients(
        "Time between tokens",
        "milliseconds",
        {**middle, **{f"{name} late": late[name] for name in late}},
    )
    for name, color in zip(middle, COLORS, strict=False):
        figure.line(f"{name} p50", middle[name], color)
        figure.line(f"{name} p99", late[name], color, "6 4")
    return figure


def roofline(result: Mapping[str, Any]) -> Figure:
    """Plots the decoding speed of one stream over the bytes of weights it reads, with the line of
    the memory bandwidth."""
    machine = result["machine"]
    megabytes = {format: count / 1e6 for format, count in machine["bytes_per_token"].items()}
    found: dict[str, list[tuple[float, float]]] = {}
    for label, numbers in result["sides"].items():
        name, format = label.rsplit(" ", 1)
        found.setdefault(name, []).append((megabytes[format], numbers["single"]["tokens_per_s"]))
    sizes = [min(megabytes.values()) / 1.3, max(megabytes.values()) * 1.3]
    roof = [(size, 1e3 * machine["read_gb_per_s"] / size) for size in sizes]
    speeds = [speed for points in found.values() for _, speed in points]
    x = log_axis("megabytes of weights read per token", sizes)
    y = log_axis("tokens/s of one stream", [*speeds, *(speed for _, speed in roof)])
    figure = Figure("Decoding against the memory's bandwidth", x, y)
    figure.line(f"{machine['read_gb_per_s']:.1f} GB/s", roof, "#999")
    for (name, points), color in zip(found.items(), COLORS, strict=False):
        figure.marks(name, points, color)
    return figure


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write every picture that has numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    has_curves = any("curve" in server for server in result["servers"].values())
    figures: dict[str, Callable[[Mapping[str, Any]], Figure]] = {"roofline": roofline}
    if has_curves:
        figures |= {"throughput": throughput, "latency": latency}
    written = []
    for name, make in figures.items():
        written.append(folder / f"{name}.svg")
        written[-1].write_text(make(result).svg(), "utf-8")
    return written


def _curves(result: Mapping[str, Any], key: str) -> dict[str, list[tuple[float, float]]]:
    return {
        name: [(float(clients), numbers[key]) for clients, numbers in server["curve"].items()]
        for name, server in result["servers"].items()
        if "curve" in server
    }


def _over_clients(title: str, label: str, curves: Mapping[str, Points]) -> Figure:
    points = [point for curve in curves.values() for point in curve]
    x = log_axis("clients", (clients for clients, _ in points), powers_of_two=True)
    return Figure(title, x, log_axis(label, (value for _, value in points)))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: plot.py RESULT.json FOLDER")
    for path in draw(json.loads(Path(sys.argv[1]).read_text("utf-8")), Path(sys.argv[2])):
        print(path)


if __name__ == "__main__":
    main()

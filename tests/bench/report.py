"""Writes the rows as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PEERS = ("llama.cpp", "OpenVINO", "vLLM", "transformers")
REACHED = {True: "yes", False: "no", None: "–"}


def table(result: Mapping[str, Any]) -> str:
    """The table: one line per row. Peers that were not measured have no column."""
    found = result["rows"]
    peers = [peer for peer in PEERS if any(peer in row["peers"] for row in found)]
    head = ["workload", "measure", "Pegboard", *peers, "ratio", "target", "reached"]
    lines = [head, ["---", "---", *["---:"] * (len(peers) + 1), "---:", "---", "---"]]
    last = ""
    for row in found:
        ratio = f"{row['ratio']:.2f} × {row['against']}" if row["ratio"] is not None else ""
        values = [_number(row["peers"].get(peer)) for peer in peers]
        workload = "" if row["workload"] == last else row["workload"]
        last = row["workload"]
        reached = REACHED[row["reached"]] if row["target"] else ""
        lines.append(
            [
                workload,
                row["measure"],
                _number(row["pegboard"]),
                *values,
                ratio,
                row["target"],
                reached,
            ]
        )
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    lines[1] = [
        cell[:-1].ljust(width - 1, "-") + cell[-1]
        for cell, width in zip(lines[1], widths, strict=True)
    ]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def circumstances(result: Mapping[str, Any]) -> str:
    """A paragraph about the machine and the conditions of the measurement."""
    machine = result["machine"]
    sentences = [
        f"{machine['cpu']}, {machine['cores']} cores "
        f"({machine['flags'] or 'no vector instructions that matter'}), memory read at "
        f"{machine['read_gb_per_s']:.1f} GB/s",
        f"model {result['model']}",
        f"medians of {result['num_rounds']} rounds",
        f"load average {result['load_before']:.2f} before and {result['load_after']:.2f} after",
    ]
    text = "; ".join(sentences) + "."
    if result["quick"]:
        text += " A quick run: small workloads, whose numbers say only that everything works."
    for name, message in result["failed"].items():
        text += f" Not measured: {name} ({message.splitlines()[0]})."
    return text


def step_line(result: Mapping[str, Any]) -> str:
    """A table of the parts of a decode step, in milliseconds."""
    lines = []
    for batch_size, shares in result["host"].items():
        parts = ", ".join(f"{name} {value:.2f}" for name, value in shares["milliseconds"].items())
        lines.append(f"decode step at batch {batch_size}, ms: {parts}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )

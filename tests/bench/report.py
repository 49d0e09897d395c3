"""The numbers as text."""

from __future__ import annotations

from typing import Any

ROWS = (
    ("offline_tokens_per_s", "offline throughput", "tok/s"),
    ("tokens_per_s", "single stream", "tok/s"),
    ("ttft_ms", "single stream, first token", "ms"),
    ("start_to_first_token_s", "process start to first token", "s"),
    ("peak_rss_mib", "peak memory", "MiB"),
)


def print_report(result: dict[str, Any]) -> None:
    """One line per number and side; behind each peer's number Pegboard's divided by it."""
    print(f"import pegboard                 {result['import_ms']:10.1f} ms")
    print(f"pegboard --help                 {result['help_ms']:10.1f} ms")
    if "serve_start_to_first_token_s" in result:
        print(f"pegboard serve to first token   {result['serve_start_to_first_token_s']:10.1f} s")
    sides: dict[str, dict[str, Any]] = result["sides"]
    own, *peers = sides
    print(f"{'':32}{own:>10} " + "".join(f"{peer:>20}" for peer in peers))
    for key, label, unit in ROWS:
        mine = sides[own][key]
        others = "".join(f"{sides[peer][key]:12.1f} ({mine / sides[peer][key]:4.2f}×)" for peer in peers)
        print(f"{label:32}{mine:10.1f} {others}  {unit}")
    step = result["step"]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in step["milliseconds"].items())
    print(f"decode step at batch 32, ms: {parts}")
    print(f"scheduling, sampling and text: {100 * step['share']:.1f} % of the step")
    print(f"load average before {result['load_before']:.2f}, after {result['load_after']:.2f}, on {result['cores']} cores")

"""Numbers become rows, a table, a page and pictures. These tests measure nothing."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from page import BEGIN, END, NOTHING, PAGE, put, section
from page import main as write_page
from plot import draw, log_axis
from report import table
from rows import Goal, as_data, make_row, rows
from servers import _percentile
from workload import shared_prefix


def side(speed: float, **more: float) -> dict[str, Any]:
    return {
        "start_to_first_token_s": 5.0,
        "single": {"tokens_per_s": speed, "ttft_ms": 1e4 / speed, "median_itl_ms": 1e3 / speed},
        "offline": {"tokens_per_s": 3 * speed, "seconds": 10.0},
        "prefix": {"cold_s": 6.0, "warm_s": 6.0, **more},
    }


def server(scale: float) -> dict[str, Any]:
    load = {"tokens_per_s": 100 * scale, "rss_mib": 600.0, "pss_mib": 500.0}
    load |= {f"{what}_ms_p{p}": p / scale for what in ("itl", "ttft") for p in (50, 90, 99)}
    return {"health_s": 0.5, "first_token_s": 4.0, "load": load, "curve": {"1": load, "8": load}}


@pytest.fixture
def result() -> dict[str, Any]:
    shares = {"host_share": 0.07, "milliseconds": {"step": 8.0, "forward": 7.0}}
    found: dict[str, Any] = {
        "quick": False,
        "num_rounds": 3,
        "load_before": 0.1,
        "load_after": 0.2,
        "failed": {},
        "model": "model.gguf",
        "machine": {
            "cpu": "A CPU",
            "flags": "avx2",
            "cores": 2,
            "read_gb_per_s": 20.0,
            "bytes_per_token": {"q4_1": 10**8, "q4_0": 9 * 10**7, "float32": 5 * 10**8},
        },
        "start": {"import_ms": 40.0, "help_ms": 90.0, "import_torch_ms": 3000.0},
        "sides": {
            "pegboard q4_1": side(150, warm_s=0.5),
            "pegboard q4_0": side(100),
            "pegboard float32": side(40),
            "llama.cpp q4_1": side(60),
            "llama.cpp q4_0": side(90),
            "vllm float32": side(20),
        },
        "servers": {"pegboard q4_1": server(4), "llama-server q4_1": server(1)},
        "host": {"1": shares, "32": shares},
    }
    found["rows"] = as_data(rows(found))
    return found


def test_every_goal_is_judged(result: dict[str, Any]) -> None:
    judged = {
        (row["workload"], row["measure"], row["target"]): row["reached"]
        for row in result["rows"]
        if row["target"]
    }
    assert judged == {
        ("one stream, Q4_1", "tokens/s", "≥ 2 × llama.cpp"): True,
        ("one stream, Q4_1", "first token, ms", "≤ 0.6 × the best peer"): True,
        ("one stream, Q4_0", "tokens/s", "≥ 1.25 × llama.cpp"): False,
        ("one stream, Q4_0", "first token, ms", "≤ 0.6 × the best peer"): False,
        ("offline, 32 requests, Q4_1", "output tokens/s", "≥ 4 × vLLM"): True,
        ("offline, 32 requests, Q4_1", "output tokens/s", "≥ 2.5 × OpenVINO"): None,
        ("offline, 32 requests, float32", "output tokens/s", "≥ 1.3 × vLLM"): True,
        ("16 requests share 1,500 tokens", "warm, s", "≤ 0.1 × cold"): True,
        ("16 requests share 1,500 tokens", "warm, s", "≤ 0.2 × vLLM"): True,
        ("serving 8 clients, Q4_1", "output tokens/s", "≥ 4 × llama.cpp"): True,
        ("serving 8 clients, Q4_1", "between tokens, p99, ms", "≤ 0.1 × llama.cpp"): False,
        ("serving 8 clients, Q4_1", "resident memory, MiB", "≤ 667.6"): True,
        ("start of the process", "/health answers, s", "≤ 1"): True,
        ("start of the process", "first token, s", "≤ 4.2"): True,
        ("start of the process", "first token (stretch), s", "≤ 1.5"): False,
        ("decode, batch 1", "outside kernels, % of a step", "≤ 8"): True,
        ("decode, batch 32", "outside kernels, % of a step", "≤ 5"): False,
    }


def test_best_is_the_fastest_peer() -> None:
    peers = {"llama.cpp q4_1": 80.0, "openvino q4_1": 50.0}
    row = make_row("w", "m", 40.0, peers, Goal("≤", 0.6, "best"), is_higher_better=False)
    assert (row.against, row.ratio, row.reached) == ("OpenVINO", 0.8, False)
    row = make_row("w", "m", 160.0, peers)
    assert (row.against, row.ratio, row.target) == ("llama.cpp", 2.0, "")


def test_nothing_but_pegboard_makes_a_table(result: dict[str, Any]) -> None:
    result["sides"] = {"pegboard q4_1": side(150, warm_s=0.5)}
    result["servers"] = {}
    result["rows"] = as_data(rows(result))
    head, _, *lines = table(result).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "workload",
        "measure",
        "Pegboard",
        "ratio",
        "target",
        "reached",
    ]
    assert len({len(line) for line in lines}) == 1 and any(
        "≥ 2 × llama.cpp" in line for line in lines
    )


def test_pictures_are_well_formed(result: dict[str, Any], tmp_path: Path) -> None:
    written = draw(result, tmp_path)
    assert [path.name for path in written] == ["roofline.svg", "throughput.svg", "latency.svg"]
    for path in written:
        root = ElementTree.fromstring(path.read_text("utf-8"))
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
            assert (
                0 <= float(circle.attrib["cx"]) <= width
                and 0 <= float(circle.attrib["cy"]) <= height
            )


@pytest.mark.parametrize("values", [[1.0], [3.0, 3.0], [0.02, 700.0], [10.0, 100.0], [1.0, 32.0]])
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_an_axis_holds_its_values(values: list[float], powers_of_two: bool) -> None:
    axis = log_axis("x", values, powers_of_two)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)
    assert list(axis.ticks) == sorted(set(axis.ticks)) and math.isclose(
        axis.place(axis.ticks[-1]), 1
    )


def test_the_page_takes_the_section_and_keeps_the_rest(result: dict[str, Any]) -> None:
    page = f"before\n{BEGIN}\n{NOTHING}\n{END}\nafter\n"
    once = put(page, section(result, ["roofline.svg"]))
    assert once.startswith("before\n") and once.endswith("\nafter\n") and NOTHING not in once
    assert put(once, NOTHING) == page
    assert BEGIN in PAGE.read_text("utf-8") and END in PAGE.read_text("utf-8")
    with pytest.raises(ValueError, match="no lines"):
        put("another page", "")


def test_the_page_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["page.py", "--check"])
    assert write_page() == 0, "run tests/bench/page.py"


def test_a_result_goes_beside_the_page(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "result.json"
    page = tmp_path / "performance.md"
    source.write_text(json.dumps(result))
    page.write_text(f"{BEGIN}\n{NOTHING}\n{END}\n")
    for arguments, status in (([str(source)], 0), (["--check"], 0), ([], 0)):
        monkeypatch.setattr(sys, "argv", ["page.py", *arguments, "--page", str(page)])
        assert write_page() == status
    text = page.read_text()
    for name in ("roofline", "throughput", "latency"):
        assert (
            f"(performance/{name}.svg)" in text
            and (tmp_path / "performance" / f"{name}.svg").exists()
        )
    page.write_text(text.replace("A CPU", "Another"))
    monkeypatch.setattr(sys, "argv", ["page.py", "--check", "--page", str(page)])
    assert write_page() == 1


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [_percentile(values, p) for p in (50, 90, 99)] == [50, 90, 99]
    assert _percentile([7.0], 99) == 7.0


def test_a_shared_prefix_is_all_that_is_shared() -> None:
    cold, warm = shared_prefix(1)
    prompts = cold.prompts + warm.prompts
    assert {tuple(prompt[:1500]) for prompt in prompts} == {tuple(cold.prompts[0][:1500])}
    assert len({tuple(prompt[1500:]) for prompt in prompts}) == 32 and {
        len(prompt) for prompt in prompts
    } == {1516}
    assert cold.max_tokens == [16] * 16

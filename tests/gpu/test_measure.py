"""The script that checks and measures a GPU runs to its end here, in Triton's interpreter, and can
be resumed. Its parts have what they need, and one that breaks does not stop the others."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from measure_driver import Measuring, chosen_stages, make_parser
from measure_requests import LONGEST, MEAN_ANSWER, NUM_REQUESTS, lengths_of
from measure_shapes import SHAPES, shape_of, work_of
from measure_stages import BY_NAME, STAGES, Goal, is_done, lines

SCRIPT = Path(__file__).with_name("measure.py")
OBEDIENT = """
import json, os, sys, time
print(json.dumps({"machine": {"device": "a card"}}), flush=True)
for line in sys.stdin:
    name = json.loads(line)["stage"]
    if name == "rope_float32":
        print("a kernel read elsewhere", file=sys.stderr)
        os._exit(3)
    if name == "rope_float16":
        print(json.dumps({"note": {"rate": 5}}), flush=True)
        time.sleep(60)
    failure = {"failed": "no memory", "right": False} if name == "llama_8b_start" else {}
    print(json.dumps({"result": {"pid": os.getpid(), **failure}}), flush=True)
"""
"""A process that breaks in one part, is stuck in another, and cannot start an engine."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def options(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(["--out", str(tmp_path / "measure.json"), *arguments])


@pytest.mark.slow
def test_it_runs_without_a_gpu_and_can_be_resumed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "measure.json"
    out.write_text(
        json.dumps(
            {"rms_norm_float32": {"right": True, "kept": 1}, "rope_float32": {"right": False}}
        ),
        "utf-8",
    )
    done = run("--device", "cpu", "--interpret", "--tiny", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text("utf-8"))
    assert results["rms_norm_float32"] == {"right": True, "kept": 1}, (
        "what is known is not measured again"
    )
    assert results["rope_float32"]["right"] and results["attention_bfloat16"]["error"] < 1e-2
    assert results["bench_decode_attention"]["rate"] > 0 and results["machine"]["tiny"]
    assert results["model_deepseek_v3"]["error"] < 1e-4
    for name in ("llama_8b", "llama_8b_int4", "mixtral", "deepseek"):
        for part in ("decode_1", "prefill_8192"):
            assert results[f"{name}_{part}"]["of_roof"] > 0
    assert results["requests_transformers"]["requests"] == results["requests"]["requests"] == 6
    goals = results["summary"]["goals"]
    assert goals.keys() == {stage.name for stage in STAGES if stage.goal}
    assert (
        "of_roof ≥ 0.85" in goals["llama_8b_decode_1"] and "bytes/s" in goals["llama_8b_decode_1"]
    )
    assert results["summary"]["not run"] == results["summary"]["wrong or failed"] == []


@pytest.fixture
def measuring(tmp_path: Path) -> Measuring:
    return Measuring(options(tmp_path), {}, (sys.executable, "-c", OBEDIENT))


def of_names(*names: str) -> list[Any]:
    return [replace(BY_NAME[name], expected_s=0.0, limit_s=0.5) for name in names]


def test_a_part_that_breaks_does_not_stop_the_others(
    measuring: Measuring, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (
        "rms_norm_float32",
        "rope_float32",
        "rope_float16",
        "rope_bfloat16",
        "silu_mul_float32",
    )
    measuring.run(of_names(*names))
    results = measuring.results
    assert "status 3. a kernel read elsewhere" in results["rope_float32"]["failed"]
    stuck = results["rope_float16"]
    assert "stopped after" in stuck["failed"] and stuck["rate"] == 5, "what it knew is not lost"
    assert results["rope_bfloat16"]["pid"] == results["silu_mul_float32"]["pid"], "in one process"
    assert json.loads(measuring.options.out.read_text("utf-8")) == results
    assert not measuring.sum_up()
    summary = results["summary"]
    assert summary["wrong or failed"] == ["rope_float32", "rope_float16"]
    command = summary["not run: command"]
    assert (
        command.startswith("python tests/gpu/measure.py --out")
        and command in capsys.readouterr().out
    )
    assert command.endswith(" ".join(summary["not run"]))


def test_without_an_engine_its_parts_are_left(measuring: Measuring) -> None:
    measuring.run(of_names("llama_8b_start", "llama_8b_decode_1", "bench_sample_tokens"))
    assert measuring.results.keys() == {"llama_8b_start", "bench_sample_tokens", "machine"}


def test_numbers_of_another_card_are_not_mixed(measuring: Measuring) -> None:
    measuring.results["machine"] = {"device": "another card"}
    with pytest.raises(SystemExit, match="is about another card, and this is a card"):
        measuring.run(of_names("rms_norm_float32"))


def test_no_part_starts_that_would_end_too_late(measuring: Measuring) -> None:
    measuring.end = 0.0
    measuring.run(STAGES)
    assert measuring.results == {}


def test_parts_that_fit_run(measuring: Measuring) -> None:
    """Without its start, no part of a model runs."""
    measuring.end = time.perf_counter() + 30
    names = ("llama_8b_start", "llama_8b_decode_1", "bench_sample_tokens")
    measuring.run([BY_NAME[name] for name in names])
    assert measuring.results.keys() == {"bench_sample_tokens", "machine"}


def test_which_parts_run(tmp_path: Path) -> None:
    roofs = ["memory_roof", "matrix_roof"]
    results: dict[str, Any] = {stage.name: {"rate": 1.0} for stage in STAGES}
    assert [stage.name for stage in chosen_stages(options(tmp_path), results)] == roofs
    results["rope_float32"]["right"] = False
    del results["mixtral_start"]
    every = chosen_stages(options(tmp_path), results)
    assert [stage.name for stage in every] == ["rope_float32", *roofs, "mixtral_start"]
    given = options(tmp_path, "--again", "bench_sample_tokens", "--only", "mixtral_start")
    some = chosen_stages(given, results)
    assert [stage.name for stage in some] == [*roofs, "bench_sample_tokens", "mixtral_start"]


def test_goals() -> None:
    goal = Goal(0.75, ("1", "of_roof"))
    assert goal.judge("a", {"a": {"1": {"of_roof": 0.75}}}) == "reached"
    assert goal.judge("a", {"a": {"1": {"of_roof": 0.7}}}) == "missed"
    assert goal.judge("a", {"a": {"failed": "no memory"}}) == goal.judge("a", {}) == "unknown"
    assert Goal(1.0, ("ms",), is_most=True).judge("a", {"a": {"ms": 1.9}}) == "missed"
    double = Goal(2.0, ("n",), of="b")
    assert double.judge("a", {"a": {"n": 4}, "b": {"n": 2}}) == "reached"
    assert double.words() == "n ≥ 2 × that of b"
    assert not is_done(None) and not is_done({"right": False}) and is_done({})


def test_the_order_and_the_time() -> None:
    """All checks come first and are meant to take less than four minutes."""
    groups = list(dict.fromkeys(stage.group for stage in STAGES))
    assert groups[:3] == ["kernels", "models", "default model"]
    assert sum(stage.expected_s for stage in STAGES if stage.group in groups[:3]) < 240
    assert all(stage.expected_s < stage.limit_s for stage in STAGES)
    shown = lines(STAGES)
    assert len(shown) == len(STAGES) and any("goal of_roof ≥ 0.85" in line for line in shown)


@pytest.mark.parametrize(
    ("name", "layers", "dense", "total"),
    [
        ("llama_8b", 32, None, 8_030_261_248),
        ("mixtral", 32, None, 46_702_792_704),
        ("deepseek", 61, 3, 671_026_419_200),
    ],
)
def test_the_weights_are_counted(name: str, layers: int, dense: int | None, total: int) -> None:
    """With all layers, the sums are those of the published models, but for norms and the like."""
    config = {**SHAPES[name], "num_hidden_layers": layers}
    if dense is not None:
        config["first_k_dense_replace"] = dense
    work = work_of(config)
    count = work.linear + work.layers * work.experts * work.expert + 2 * work.head
    assert count == pytest.approx(total, rel=1e-4)


def test_what_a_step_reads() -> None:
    work = work_of(shape_of("llama_8b", tiny=False))
    assert work.stored == 32 * 2 * 8 * 128
    assert work.step_bytes(2, 10) - work.step_bytes(1, 10) == 2 * 10 * work.stored
    mixture = work_of(shape_of("mixtral", tiny=False))
    one, all_of_them = mixture.step_bytes(1, 0), mixture.step_bytes(10_000, 0)
    assert all_of_them - one == pytest.approx(2 * mixture.layers * 6 * mixture.expert)
    assert work.prompt_operations(1) > 2 * work.linear


def test_the_page_names_parts_and_goals() -> None:
    """The commands of the page read as they should, and every goal is in its table."""
    page = SCRIPT.parents[2] / "docs/first_hour_on_a_gpu.md"
    text = page.read_text("utf-8")
    commands = re.findall(r"python tests/gpu/measure\.py([^`\n]*)", text)
    assert sum("--only" in command for command in commands) > 5
    for command in commands:
        make_parser().parse_args(command.split())
    for stage in STAGES:
        assert stage.goal is None or f"| `{stage.name}`" in text


def test_lengths_of_requests() -> None:
    lengths = lengths_of(NUM_REQUESTS, MEAN_ANSWER, LONGEST, 1)
    assert lengths == lengths_of(NUM_REQUESTS, MEAN_ANSWER, LONGEST, 1)
    assert min(lengths) >= 4 and max(lengths) <= LONGEST
    assert 0.8 * MEAN_ANSWER < sum(lengths) / len(lengths) < 1.1 * MEAN_ANSWER


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_what_is_missing() -> None:
    done = run()
    assert (
        done.returncode == 2
        and "torch finds no GPU; --device cpu --interpret --tiny" in done.stderr
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch finds none")
def test_a_gpu_is_right(tmp_path: Path) -> None:
    """Twice, because one run does not have the time for all parts."""
    out = str(tmp_path / "measure.json")
    run("--out", out)
    done = run("--out", out)
    assert done.returncode == 0, done.stdout + done.stderr

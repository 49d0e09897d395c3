"""The file holds what an engine measures."""

from __future__ import annotations

import json
from pathlib import Path

from pegboard_metrics_jsonl.options import JsonlOptions
from pegboard_metrics_jsonl.sink import JsonlSink

from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.metrics import MetricsSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_engine import FakeEngine


def test_contract() -> None:
    check_entry(installed_entry("metrics", "jsonl"))


def test_an_engine_writes_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(JsonlOptions(path=path), MetricsSetup(model_name="fake"))
    engine = FakeEngine(metrics=[sink])
    engine.generate([3, 4, 5], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    sink.close()
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert {line["model"] for line in lines} == {"fake"}
    assert sum(line.get("prompt_tokens_total", 0) for line in lines) == 3
    assert sum(line.get("generation_tokens_total", 0) for line in lines) == 4
    assert sum(len(line.get("e2e_request_latency_seconds", [])) for line in lines) == 1


def test_a_second_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"time_s": 0}\n', "utf-8")
    JsonlSink(JsonlOptions(path=path), MetricsSetup(model_name="fake")).close()
    assert path.read_text("utf-8") == '{"time_s": 0}\n'

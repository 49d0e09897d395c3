"""`pegboard check MODEL`: a verdict with its reasons, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.cli.main import main
from pegboard.config.schema import Settings
from pegboard.interfaces.platform import MemoryNumbers, Platform
from pegboard.interfaces.weight_loader import TensorEntry
from pegboard.plugins.registry import Registry
from pegboard_doctor import check


def test_what_does_not_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "nothing")
    assert main(["check", missing, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["runs"] == "no" and "nothing" in facts["why"]
    assert main(["check", missing]) == 1
    assert capsys.readouterr().out.startswith("runs      no\nwhy       ")


@pytest.mark.real_model
def test_the_default_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--kv-cache-memory-bytes", "1g"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (
        told["runs"] == "yes"
        and told["context"] == "8,192 tokens"
        and "pegboard-pack-gguf" in told["plugins"]
    )
    assert {"executor:", "sampler:", "scheduling_policy:", "attention:"} <= {
        each.strip().partition(":")[0] + ":" for each in told["plugins"].split(",")
    }


@pytest.mark.real_model
def test_what_does_not_fit_into_memory_does_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check", "--kv-cache-memory-bytes", "64m", "--json"]) == 1
    assert "lower max_model_len to at most" in json.loads(capsys.readouterr().out)["why"]
    platform = check._platform

    def small(registry: Registry, settings: Settings) -> Platform:
        found = platform(registry, settings)
        found.memory = lambda: MemoryNumbers(4000, 4000, 0, 0)
        return found

    monkeypatch.setattr(check, "_platform", small)
    assert main(["check", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["runs"] == "no"
        and facts["why"].endswith("and 3.9 KiB are free")
        and "MiB in the files" in facts["weights"]
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float32", "bfloat16", "F16", "Q4_1"]),
            st.integers(1, 9),
            st.integers(1, 999),
        )
    )
)
def test_floats_take_the_size_of_the_compute_type(tensors: list[tuple[str, int, int]]) -> None:
    stored = {
        str(number): TensorEntry(str(number), (rows, 2), type_, "file", 0, num_bytes)
        for number, (type_, rows, num_bytes) in enumerate(tensors)
    }
    checkpoint = SimpleNamespace(dtype="bfloat16", tensors=stored)
    platform = SimpleNamespace(defaults=lambda dtype: {"dtype": dtype})
    for dtype, size in (("float32", 4), ("auto", 2)):
        expected = sum(
            num_bytes if type_ == "Q4_1" else rows * 2 * size for type_, rows, num_bytes in tensors
        )
        assert check._weight_bytes(checkpoint, dtype, platform) == expected

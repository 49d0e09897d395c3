"""`pegboard bench sweep`: which commands are run, what is kept, and what is drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_command_bench import sweep, sweep_plots

from pegboard.cli.main import main

SERVER = """
import time
time.sleep(600)
"""
BENCH = """
import json, pathlib, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(words["--result-dir"])
rate = float(words["--max-concurrency"])
result = {"output_throughput": 10 * rate, "p99_ttft_ms": rate}
(folder / words["--result-filename"]).write_text(json.dumps(result))
"""


class Sweep:
    """A sweep with programs that stand for a server and a measurement. They are quick."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("server", SERVER), ("bench", BENCH)):
            (folder / f"{name}.py").write_text(text, "utf-8")

    def params(self, name: str, content: Any) -> str:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(content), "utf-8")
        return str(path)

    def run(self, *words: str) -> int:
        programs = [
            *("--serve-cmd", f"{sys.executable} {self.folder}/server.py"),
            # `--save-result` has no value, so the last word of the command takes its place
            *("--bench-cmd", f"{sys.executable} {self.folder}/bench.py"),
            *("-o", str(self.folder / "results")),
        ]
        return main(["bench", "sweep", "serve", *programs, *words])

    @property
    def results(self) -> Path:
        (folder,) = (self.folder / "results").iterdir()
        return folder


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Flags without a value are left out, because the stand-ins read pairs."""
    plain = sweep.flags
    monkeypatch.setattr(
        sweep, "flags", lambda values: plain({k: v for k, v in values.items() if v is not True})
    )
    return Sweep(tmp_path)


def num_servers(capsys: pytest.CaptureFixture[str]) -> int:
    """Return how many servers were started, by the commands that a sweep shows."""
    return capsys.readouterr().err.count("server.py")


def test_every_combination_is_measured(example: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    serve = example.params("serve", [{"max_num_seqs": 1}, {"max-num-seqs": 2}])
    bench = example.params("bench", {"one": {"max_concurrency": 1}, "two": {"max_concurrency": 2}})
    words = ("--serve-params", serve, "--bench-params", bench, "--num-runs", "2")
    assert example.run(*words) == 0
    rows = json.loads((example.results / "summary.json").read_text("utf-8"))
    keys = ("max_num_seqs", "max_concurrency", "run_number", "output_throughput")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        (seqs, users, run, 10.0 * users) for seqs in (1, 2) for users in (1, 2) for run in (0, 1)
    ]
    assert num_servers(capsys) == 2, "one server for all of its loads"


def test_a_sweep_goes_on_where_it_was(example: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    bench = example.params("bench", [{"max_concurrency": 1}, {"max_concurrency": 2}])
    assert example.run("--bench-params", bench, "--num-runs", "1") == 0
    lost = next(example.results.glob("*max_concurrency=2/run=0.json"))
    stays = next(example.results.glob("*max_concurrency=1/run=0.json"))
    lost.unlink()
    stays.write_text('{"output_throughput": 7.0}')
    words = ("--bench-params", bench, "--num-runs", "1", "--resume", example.results.name)
    assert example.run(*words) == 0
    assert lost.is_file() and stays.read_text() == '{"output_throughput": 7.0}'
    assert example.run(*words) == 0
    assert num_servers(capsys) == 2, "no server is started for nothing"


def test_linked_parameters_are_equal(example: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    serve = example.params("serve", [{"max_num_seqs": 1}, {"max_num_seqs": 2}])
    bench = example.params("bench", [{"max_concurrency": 2}, {"max_concurrency": 3}])
    words = ["--serve-params", serve, "--bench-params", bench, "--num-runs", "1", "--dry-run"]
    assert example.run(*words, "--link-vars", "max_num_seqs=max_concurrency") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "--max-num-seqs 2" in lines[0] and "--max-concurrency 2" in lines[1]
    assert example.run(*words, "--link-vars", "max_num_seqs=absent") == 2
    assert not (example.folder / "results").exists()


def test_a_server_that_ends_is_told(example: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    (example.folder / "server.py").write_text("raise SystemExit(3)")
    (example.folder / "bench.py").write_text("import time; time.sleep(600)")
    assert example.run("--num-runs", "1") == 1
    assert "the server ended with status 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--bench-params", "absent.json"], "absent.json"),
        (["--bench-params", "LIST"], "expected a list of sets of flags"),
        (["--link-vars", "a"], "expected NAME=NAME"),
        (["--bench-params", "TWICE"], "two combinations would write"),
        (["--resume", "never"], "there is no folder"),
    ],
)
def test_wrong_words(
    example: Sweep, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"LIST": [1, 2], "TWICE": [{"model": "a/b"}, {"model": "a_b"}]}
    words = [example.params(word, files[word]) if word in files else word for word in words]
    assert example.run(*words) == 2
    assert told in capsys.readouterr().err


def test_parameters_become_flags() -> None:
    values = {"a_b": 1, "on": True, "off": False, "gone": None, "many": [1, "x"], "j": {"k": 1}}
    words = ["--a-b", "1", "--on", "--no-off", "--many", "1", "x", "--j", '{"k": 1}']
    assert sweep.flags(values) == words


# --- pictures -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_the_frontier_has_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    line = sweep_plots.frontier(points)
    for x, y in points:
        assert any(a >= x and b >= y for a, b in line)
    assert all(a < c and b > d for (a, b), (c, d) in zip(line, line[1:], strict=False))


def test_pictures_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {
            "max_concurrency": users,
            "seqs": seqs,
            "output_throughput": 5 * seqs,
            "p99_ttft_ms": users,
        }
        for users in (1, 4)
        for seqs in (1, 2)
    ]
    (tmp_path / "summary.json").write_text(json.dumps(rows))
    command = ["bench", "sweep"]
    assert main([*command, "plot", str(tmp_path), "--curve-by", "seqs"]) == 0
    assert (
        main(
            [
                *command,
                "plot_pareto",
                str(tmp_path),
                "--label-by",
                "seqs",
                "-o",
                str(tmp_path / "pareto.svg"),
            ]
        )
        == 0
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "pareto.svg").read_text("utf-8")
    assert main([*command, "plot", str(tmp_path), "--var-y", "p99_tft_ms"]) == 2
    assert "did you mean 'p99_ttft_ms'" in capsys.readouterr().err

"""`pegboard plugins test` accepts a new plugin and names each defect of a broken one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.cli.main import main
from pegboard.config.sources import plugin_config
from pegboard.errors import UsageError
from pegboard.installed import Entry
from pegboard.plugins.importing import import_spec
from pegboard.plugins.registry import Registry
from pegboard_testing.authoring.conformance import (
    entries_of,
    examine,
    run_tests,
    serve,
)
from pegboard_testing.authoring.scaffold import write_package
from pegboard_testing.contract_source import check_imports, difference
from pegboard_testing.fake_distributions import FakeDistributions, spec_source


def made(tmp_path: Path, kind: str = "draft") -> Path:
    """Return the folder of a new package, which is installed if the folder is on the path. Its
    tests are next to it."""
    folder = write_package(kind, "mine", tmp_path)
    FakeDistributions(folder).add(
        f"pegboard-{kind}-mine", {kind: {"mine": f"pegboard_{kind}_mine.plugin:MINE"}}
    )
    return folder


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    """Return the exit status, the report and its checks by name."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pegboard", "plugins", "test", "draft:mine", "--json", *words]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    found = json.loads(ended.stdout)
    return ended.returncode, found, {one["check"]: one for one in found["checks"]}


def test_a_new_plugin_conforms(tmp_path: Path) -> None:
    folder = made(tmp_path)
    status, found, checks = run(folder, "--tests", os.path.relpath(folder / "tests"))
    assert (status, found["conforms"], found["plugin"], found["version"]) == (
        0,
        True,
        "draft:mine",
        "1.0",
    )
    assert {one["status"] for one in checks.values()} == {"passed"}, checks
    assert "tests are of the contract of draft" in checks["contract"]["reason"]
    assert checks["a request"]["reason"] == "48 tokens of 3 requests on a tiny model"


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All plugins of the package are tested, if they are installed."""
    (root := tmp_path / "site").mkdir()
    fakes = FakeDistributions(root)
    points = {"sampler": {"one": "parts:ONE"}, "metrics": {"two": "parts:TWO"}}
    fakes.add("Acme.Parts", points)
    registry = Registry(fakes.scan())
    project = (
        '[project]\nname = "acme-parts"\n[project.scripts]\nx = "y:z"\n'
        '[project.entry-points."pegboard.sampler.v1"]\none = "parts:ONE"\n'
        '[project.entry-points."pegboard.metrics.v1"]\ntwo = "parts:TWO"\n'
    )
    file = tmp_path / "pyproject.toml"
    file.write_text(project)
    assert [entry.name for entry in entries_of(tmp_path, registry)] == ["two", "one"]
    for text, told in (
        (project + 'three = "parts:THREE"\n', "'three' of pegboard.metrics.v1 is not installed"),
        ('[project]\nname = "x"\n', "has no entry points of pegboard"),
        ("[project", "cannot be read"),
        ("", "cannot be read: KeyError"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=told):
            entries_of(tmp_path, registry)
    assert main(["plugins", "test", str(tmp_path / "nowhere")]) == 2
    assert "or a folder with a pyproject.toml" in capsys.readouterr().err


def test_each_defect_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path)
    source = folder / "pegboard_draft_mine" / "proposer.py"
    replace(
        source,
        "import numpy as np\n",
        "import numpy as np\n\nfrom pegboard.engine import scheduler\n",
    )
    replace(
        source, "def add(self, row: int, token_ids", "def add(self, row: int, text: str, token_ids"
    )
    replace(
        folder / "pegboard_draft_mine" / "plugin.py",
        "from __future__ import annotations\n",
        "import pydantic\n",
    )
    replace(folder / "tests" / "test_mine.py", "(DraftContract)", "")
    status, found, checks = run(folder)
    assert (status, found["conforms"]) == (1, False)
    failed = {name: one["reason"] for name, one in checks.items() if one["status"] == "failed"}
    assert failed.keys() == {
        "the spec is light and has no side effects",
        "signatures",
        "imports",
        "tests",
        "contract",
        "a request",
    }
    assert "imports pydantic" in failed["the spec is light and has no side effects"]
    assert "add takes (self, row: int, text: str, token_ids" in failed["signatures"].replace(
        "'", ""
    )
    assert (
        "proposer.py:8 imports pegboard.engine.scheduler; plugins may import" in failed["imports"]
    )
    assert "pegboard_testing.contract_draft" in failed["contract"]
    assert (
        "MineProposer' has add(row: " in failed["a request"]
        and "it is called as add(self, row: " in failed["a request"]
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("from pegboard.worker.kernels import Kernels", "plugins may import"),
        ("import pegboard.config.limits", "plugins may import"),
        ("def f():\n    from pegboard.interfaces.spec import _hidden", "_hidden is private"),
        (
            "from pegboard_draft_ngram.index import NGramIndex",
            "of the plugin package pegboard-draft-ngram",
        ),
    ],
)
def test_what_may_not_be_imported(
    line: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, "scheduling_policy")
    monkeypatch.syspath_prepend(folder)
    entry = Entry(
        "scheduling_policy",
        "mine",
        "pegboard-scheduling-policy-mine",
        "1.0",
        "pegboard_scheduling_policy_mine.a:B",
        "",
    )
    check_imports(entry)
    (folder / "pegboard_scheduling_policy_mine" / "more.py").write_text(line + "\n")
    with pytest.raises(AssertionError, match=rf"more\.py:\d imports .*{reason}"):
        check_imports(entry)


@pytest.mark.parametrize("kind", ["model", "quantization", "kv_connector"])
def test_what_plugins_share_may_be_imported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages that `plugins new` writes import it."""
    monkeypatch.syspath_prepend(made(tmp_path, kind))
    value = f"pegboard_{kind}_mine.a:B"
    check_imports(Entry(kind, "mine", f"pegboard-{kind}-mine", "1.0", value, ""))


class Interface:
    def plain(self, a: int, b: int) -> None: ...
    def named(self, a: int, *, key: str) -> None: ...
    async def later(self) -> None: ...


class Plugin:
    """The methods that fit have the name of the interface's method first."""

    def plain_other_names(self, x: int, y: int = 0, *more: int) -> None: ...
    def plain_short(self, a: int) -> None: ...
    def plain_long(self, a: int, b: int, c: int) -> None: ...
    def named_any(self, a: int, **keys: str) -> None: ...
    def named_other(self, a: int, *, word: str = "") -> None: ...
    async def later_too(self) -> None: ...
    def later_not(self) -> None: ...


@pytest.mark.parametrize(
    ("declared", "given", "reason"),
    [
        (Interface.plain, Plugin.plain_other_names, ""),
        (Interface.plain, Plugin.plain_short, "too many positional arguments"),
        (Interface.plain, Plugin.plain_long, "missing a required argument: 'c'"),
        (Interface.named, Plugin.named_any, ""),
        (Interface.named, Plugin.named_other, "unexpected keyword argument 'key'"),
        (Interface.later, Plugin.later_too, ""),
        (Interface.later, Plugin.later_not, "must be async"),
        (Interface.plain, len, ""),
    ],
)
def test_how_methods_differ(
    declared: Callable[..., Any], given: Callable[..., Any], reason: str
) -> None:
    found = difference(declared, given)
    assert reason in found and bool(found) == bool(reason)


def test_wrong_usage_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "test", "ngram"]) == 2
    assert "expected KIND:NAME" in capsys.readouterr().err
    assert main(["plugins", "test", "draft:ngram", "--tests", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["plugins", "test", "draft:ngram", "--options", "path=/tmp"]) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert main(["plugins", "test", "draft:ngram", "--options", "[]"]) == 2
    assert "expected a JSON object" in capsys.readouterr().err


def test_a_request_needs_options_and_a_kind_that_serves() -> None:
    def served(kind: str, name: str, options: dict[str, Any]) -> tuple[str, str]:
        entry = Registry.discover(plugin_config()).find(kind, name)
        result = serve(entry, import_spec(entry), options)
        return result.status, result.reason

    status, reason = served("kv_connector", "shared_storage", {})
    assert status == "none" and "shared_storage_path; give them with --options" in reason
    assert served("tool_parser", "hermes", {})[0] == "none"
    assert (
        served("kv_connector", "shared_storage", {"shared_storage_path": "/dev/null/folder"})[0]
        == "failed"
    )


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import time; time.sleep(10**6)", "did not end within 6 s (--limit)"),
        ("import os; os._exit(0)", "ended the program"),
    ],
)
def test_a_test_that_hangs_or_exits_is_named(tmp_path: Path, body: str, told: str) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_good(): pass\ndef test_sick():\n    {body}\n")
    counts, output, status = run_tests(tmp_path, 6)
    assert (counts, status) == ({}, 1) and output.endswith(f"test_it.py::test_sick {told}")


@pytest.mark.parametrize(
    ("body", "told"),
    [("time.sleep(10**6)", "takes more than 4 s"), ("os._exit(0)", "ends the interpreter")],
)
def test_code_that_hangs_or_exits_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    fakes = FakeDistributions(tmp_path)
    spec = spec_source("draft", probe="stuck_probe:probe")
    fakes.add("acme", {"draft": {"stuck": "stuck_draft:SPEC"}}, {"stuck_draft": spec})
    fakes.write(stuck_probe=f"import os, time\ndef probe(facts): {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (entry,) = fakes.scan().entries
    *_, last = examine(entry, None, {}, 4)
    assert (
        last.status == "failed"
        and last.reason == f"draft:stuck (acme 1.0): the check of 'probe' {told}"
    )

"""`pegboard plugins doctor`: what is wrong with the installed plugins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pegboard.cli.main import command_setup
from pegboard.config.schema import PluginConfig
from pegboard.plugins import discovery
from pegboard.plugins.discovery import Scan
from pegboard.plugins.importing import module_name
from pegboard.plugins.registry import Registry
from pegboard_doctor import doctor, trials
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_distributions import FakeDistributions, spec_source

WORDS = {
    "check",
    "collect-env",
    *(f"plugins-{word}" for word in ("cost", "diff", "doctor", "lock", "show", "sync", "why")),
}
PARTS = """
from pegboard.interfaces.spec import Broken, Ok
def ok(facts): return Ok({"level": 3})
def broken(facts): return Broken("library damaged")
def late(facts):
    while True: pass
def leaves(facts):
    import os
    os._exit(0)
class Half:
    def sample(self, logits, step): pass
"""


@pytest.fixture
def fakes(
    fake_distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> FakeDistributions:
    fake_distributions.write(command_parts=PARTS)
    monkeypatch.setattr(discovery, "scan", fake_distributions.scan)
    return fake_distributions


def run(*words: str) -> int:
    return doctor.Doctor(None, command_setup("plugins-doctor")).run(words)


@pytest.mark.parametrize("word", sorted(WORDS))
def test_contract(word: str) -> None:
    check_entry(installed_entry("command", word))


def test_a_file_for_development_is_a_note(
    fakes: FakeDistributions,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "mine.py"
    (tmp_path / "config.toml").write_text(f'plugins.files = ["{file}"]')
    monkeypatch.setenv("PEGBOARD_CONFIG", str(tmp_path / "config.toml"))
    for attribute, status in (("", 0), ("    spec_fields = 3\n", 1)):
        file.write_text(
            'class Mine:\n    plugin = "sampler:mine"\n    add = remove = sample = score = '
            f"print\n{attribute}"
        )
        monkeypatch.delitem(sys.modules, module_name(str(file)), raising=False)
        assert run() == status
        shown = capsys.readouterr().out
        assert (
            ("note" in shown and "make it a package" in shown)
            if status == 0
            else "has spec_fields = 3, expected" in shown
        )


def test_doctor_is_content_with_good_plugins(
    fakes: FakeDistributions, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.add(
        "acme",
        {"attention": {"wide": "good_spec:SPEC"}},
        {"good_spec": spec_source("attention", probe="command_parts:ok")},
    )
    assert run("--json") == 0, capsys.readouterr().out


def test_doctor_finds_what_is_wrong(
    fakes: FakeDistributions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that the variable which the sick plugin sets is removed after the test
    monkeypatch.setenv("SICK", "0")
    monkeypatch.delenv("SICK")
    modules = {
        "sick_heavy": "import numpy\n" + spec_source("sampler"),
        "sick_effects": "import os\nos.environ['SICK'] = '1'\n" + spec_source("sampler"),
        "sick_probe": spec_source("sampler", probe="command_parts:broken"),
        "sick_exit": "import os\nos._exit(3)\n",
        "sick_part": spec_source("sampler", implementation="command_parts.nowhere:Sampler"),
        "sick_after": spec_source("sampler"),
        "sick_methods": spec_source("sampler", implementation="command_parts:Half"),
        "sick_nobody": spec_source("sampler", implementation="command_parts:Nobody"),
        "sick_flag": spec_source("sampler", flags=frozenset({"quick"})),
        "sick_sleepy": "import time\ntime.sleep(0.6)\n" + spec_source("sampler"),
        "sick_hang": "import time\ntime.sleep(10**6)\n",
        ("sick_stubborn"): (
            "while True:\n    try: __import__('time').sleep(9)\n    except BaseException: pass\n"
        ),
        "sick_late": spec_source("sampler", probe="command_parts:late"),
        "sick_leaves": spec_source("sampler", probe="command_parts:leaves"),
    }
    names = {name.removeprefix("sick_"): f"{name}:SPEC" for name in modules}
    requires = ["nothing-of-this-name>=2", "pytest>=1"]
    fakes.add(
        "sick", {"sampler": {**names, "missing": "sick_none:SPEC"}}, modules, requires=requires
    )
    fakes.add(
        "twin", {"sampler": {"after": "sick_after:SPEC"}, "pegboard.attention.v7": {"far": "x:Y"}}
    )
    # One entry's module ends the interpreter. The process that imports it gives no answer, so this
    # process must not import it.
    monkeypatch.setattr(doctor, "LIMIT_S", 1.0)
    monkeypatch.setattr(trials, "LIMIT_S", 1.0)
    connector = spec_source(
        "kv_connector", implementation="command_parts:Half", worker="command_parts:Nobody"
    )
    fakes.add("far", {"kv_connector": {"far": "far_spec:SPEC"}}, {"far_spec": connector})
    findings = doctor.examine(Registry(fakes.scan()))
    text = {(finding.subject, finding.text) for finding in findings if finding.level == "problem"}

    def says(subject: str, words: str) -> bool:
        return any(subject in where and words in what for where, what in text)

    assert says("sampler:heavy", "imports numpy")
    assert says("sampler:effects", "the environment")
    assert says("sampler:probe", "library damaged")
    assert says("sampler:part", "there is no module command_parts.nowhere")
    assert says("sampler:exit", "ends the interpreter")
    assert says("sampler:missing", "sick_none")
    assert says(
        "sampler:methods",
        "has no add, remove, score, which pegboard.interfaces.sampler.Sampler needs",
    )
    assert says("sampler:nobody", "there is no Nobody in command_parts")
    assert says(
        "sampler:flag", "flags has 'quick', which sampler does not know; known: batch_invariant"
    )
    assert says("sampler:sleepy", "ms to import, the budget is 20 ms")
    assert says("sampler:hang", "importing it takes more than 1 s")
    assert says("sampler:stubborn", "importing it takes more than 1 s")
    assert says("sampler:late", "its probe takes more than 1 s")
    assert says("sampler:leaves", "its probe ends the interpreter")
    assert says("kv_connector:far", "worker 'command_parts:Nobody': there is no Nobody")
    assert says("sampler:after", "'sick:after' or 'twin:after'")
    assert says("attention:far", "upgrade pegboard")
    assert says("sick", "nothing-of-this-name") and not says("sick", "pytest")
    assert not says("sampler:after (sick", "")
    monkeypatch.delenv("SICK")
    monkeypatch.setattr(doctor, "examine", lambda registry: findings)
    assert run() == 1
    assert f"{len(text)} problems" in capsys.readouterr().out


def test_duplicates_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for folder, version in (("first", "1.0"), ("same", "1.0"), ("stale", "0.9")):
        FakeDistributions(tmp_path / folder).add(
            "Acme", {"sampler": {"s": "acme:S"}}, version=version
        )
        folders.append(str(tmp_path / folder))
    monkeypatch.setattr(sys, "path", [*folders, folders[0]])
    same, stale = doctor.examine(Registry(Scan()))[::-1]
    assert (same.level, same.subject) == (
        "note",
        "acme 1.0",
    ) and f"in {folders[1]}, after 1.0 in {folders[0]}" in same.text
    assert (stale.level, stale.subject) == (
        "problem",
        "acme 0.9",
    ) and "remove the stale one" in stale.text


HOOKS = """
import os, time
def pegboard_doctor_checks():
    {}
"""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("time.sleep(10**6)", "pegboard_doctor_checks takes more than 1 s"),
        ("os._exit(0)", "pegboard_doctor_checks ends the interpreter"),
        ("return 1 / 0", "pegboard_doctor_checks raised ZeroDivisionError"),
    ],
)
def test_a_hook_that_hangs_or_exits_is_named(
    fakes: FakeDistributions, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    fakes.add("sick", {"hooks": {"sick": "sick_hooks"}}, {"sick_hooks": HOOKS.format(body)})
    monkeypatch.setattr(trials, "LIMIT_S", 1.0)
    (finding,) = doctor.examine(Registry(fakes.scan(), PluginConfig(enable=["hooks:sick"])))
    assert "hooks:sick" in finding.subject and told in finding.text

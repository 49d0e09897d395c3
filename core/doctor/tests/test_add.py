"""`pegboard plugins add`: from what a person types to the pip command."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from pegboard.cli.main import main
from pegboard.errors import UsageError
from pegboard.interfaces.command import Command, CommandSetup
from pegboard.plugins.defaults import catalogue
from pegboard.plugins.names import not_found
from pegboard_doctor import add
from pegboard_doctor.add import Add, requirement
from pegboard_testing.contract_command import CommandContract
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("command", "plugins-add"))


class TestAdd(CommandContract):
    word = "plugins add"

    def command(self, setup: CommandSetup) -> Command:
        return Add(None, setup)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add, "_is_installed", lambda name: False)


def test_every_plugin_has_the_answer_of_the_error_for_a_missing_one() -> None:
    for kind, names in catalogue().items():
        for name in names:
            advice = re.search(r"pip install (\S+)$", str(not_found(kind, name, [])))
            assert advice is not None and requirement(f"{kind}:{name}") == advice[1]


@pytest.mark.usefixtures("nothing_installed")
def test_the_command_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gguf", "tool_parser:hermes", "Pegboard_Family.Hermes", "cpu"]
    assert main(["plugins", "add", *words]) == 0
    assert capsys.readouterr().out == (
        "pip install pegboard-pack-gguf pegboard-family-hermes 'pegboard[cpu]'\n"
    )


def test_what_is_installed_is_not_installed_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "add", "gguf"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("pegboard-pack-gguf ") and shown.endswith("is installed\n")


@pytest.mark.usefixtures("nothing_installed")
def test_pip_is_run_and_its_status_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    words = ["gguf", "--yes", "--index-url", "file:///somewhere/simple"]
    assert main(["plugins", "add", *words]) == 3
    given = ["--index-url", "file:///somewhere/simple", "pegboard-pack-gguf"]
    assert commands == [["-m", "pip", "install", *given]]


@pytest.mark.usefixtures("nothing_installed")
def test_without_pip_the_command_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(add, "find_spec", lambda name: None)
    assert main(["plugins", "add", "gguf", "--yes"]) == 2
    assert "pip install pegboard-pack-gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hub", "name one of lora_resolver:hub (pegboard-lora-resolver-hub), model_source:hub"),
        ("mistal", "did you mean 'mistral'"),
        ("tokenizr:hf", "no kind of plugin is called 'tokenizr', did you mean 'tokenizer'?"),
        ("tool_parser:herms", "did you mean 'tool_parser:hermes'"),
        ("acme-sampler", "install others with pip"),
    ],
)
def test_other_names_are_refused(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        requirement(name)

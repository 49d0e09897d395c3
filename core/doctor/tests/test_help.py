"""`pegboard help`: what it explains, and what it says of words that mean nothing."""

from __future__ import annotations

import pytest

from pegboard.cli.main import main
from pegboard.interfaces.command import Command, CommandSetup
from pegboard_doctor.help import Help
from pegboard_testing.contract_command import CommandContract
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("command", "help"))


class TestHelp(CommandContract):
    word = "help"

    def command(self, setup: CommandSetup) -> Command:
        return Help(None, setup)


def test_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert main(["help"]) == main(["help", "help"]) == 0
    assert capsys.readouterr().out == 2 * shown


def test_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["help", "plugins"])
    assert "usage: pegboard plugins" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--max-model-len", "max-model-len", "max_model_len"])
def test_a_setting(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", word]) == 0
    assert "Maximum tokens of prompt plus output" in capsys.readouterr().out


def test_a_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "scheduling-policy"]) == 0
    shown = capsys.readouterr().out
    assert (
        "order, victims and step budget" in shown
        and "fcfs" in shown
        and "pegboard help scheduling_policy.NAME" in shown
    )


def test_the_options_of_a_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "quantization.rtn"]) == 0
    assert "group_size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["schedulin_policy"], "did you mean 'scheduling_policy'"),
        (["max_modl_len"], "did you mean 'max_model_len'"),
        (["sampler.torhc"], "torch"),
        (["one", "two"], "two"),
    ],
)
def test_what_is_not_known(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *words]) in (1, 2)
    assert told in capsys.readouterr().err

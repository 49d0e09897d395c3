"""The command passes the contract tests of its kind and of all plugins."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from pegboard_command_run_batch.command import RunBatch, answer_all, key_header

from pegboard.errors import UsageError
from pegboard.interfaces.command import Command, CommandSetup
from pegboard_testing.contract_command import CommandContract, command_setup
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("command", "run-batch"))


class TestRunBatch(CommandContract):
    word = "run-batch"

    def command(self, setup: CommandSetup) -> Command:
        return RunBatch(None, setup)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--enable-force-include-usage"], "every answer has its usage"),
        (["--port", "1"], "--port needs --enable-metrics"),
        (["--root-path", "/x"], "unknown flag --root-path"),
    ],
)
def test_flags_without_an_effect_are_refused(words, told):
    with pytest.raises(UsageError, match=told):
        RunBatch(None, command_setup("run-batch")).run(["-i", "in", "-o", "out", *words])


def test_settings_of_a_shared_file_that_have_no_effect_are_named(tmp_path, capsys):
    """A config file that is shared with a server may have them. Those that act on a batch are not
    named."""
    shared = tmp_path / "shared.yaml"
    shared.write_text(
        "root_path: /x\nssl_keyfile: k.pem\napi_server_count: 2\nresponse_role: bot\napi_key: [k]\n"
    )
    words = ["-i", "ftp://in", "-o", "out", "--config", str(shared)]
    for more, named in (
        ([], ["root_path", "ssl_keyfile", "api_server_count"]),
        (["--enable-metrics"], ["api_server_count"]),
    ):
        with pytest.raises(UsageError, match="ftp"):
            RunBatch(None, command_setup("run-batch")).run([*words, *more])
        told = capsys.readouterr().err
        assert told == (
            "run-batch has no use for these settings: "
            f"{', '.join(f'{name} ({shared})' for name in named)}\n"
        )


def test_the_batch_has_the_servers_key(tmp_path, monkeypatch):
    """A key in a shared config file or in the environment does not refuse the lines of the
    batch."""
    sent = []

    async def app(scope, receive, send):
        sent.append(dict(scope["headers"]).get(b"x-api-key"))
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    source = tmp_path / "in"
    source.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}})
    )
    monkeypatch.setenv("PEGBOARD_API_KEY", "from the environment")
    for keys in (["first", "second"], None, []):
        assert asyncio.run(
            answer_all(app, source, io.StringIO(), key_header(keys), show_progress=False)
        ) == (1, 0)
    assert sent == [b"first", b"from the environment", None]

"""`pegboard` as users type it: with a running server, and with mistakes. A mistake gives one line,
never a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pegboard_api_admin.admin import AdminApi
from pegboard_api_admin.lora import LoRAApi
from pegboard_api_admin.options import AdminOptions, LoRAOptions, WorkerOptions
from pegboard_api_admin.plugin import ADMIN, LORA, WORKERS
from pegboard_api_admin.workers import WorkersApi
from pegboard_api_openai.plugin import TOKENIZER_INFO
from pegboard_api_openai.tokenize import TokenizerInfoApi
from server_process import HTTP, Server, cli

from pegboard.cli.main import command_setup
from pegboard.interfaces.api import ApiSetup
from pegboard.plugins.discovery import scan_path
from pegboard_server.serve import make_parser


def check_one_line(stderr: str) -> str:
    """Returns the one line that names the mistake, without log lines."""
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("pegboard: error: ")]
    return line


def test_chat_and_complete(server: Server) -> None:
    ended = cli("complete", "--url", f"{server.url}/v1", "--quick", "2, 4, 6,", "--max-tokens", "6")
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.strip()
    ended = cli(
        "chat",
        "--url",
        f"{server.url}/v1",
        "--quick",
        "What is the capital of France?",
        "--max-tokens",
        "16",
    )
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.strip()


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_no_server_there(command: str) -> None:
    ended = cli(command, "--url", "http://127.0.0.1:9/v1", "--quick", "Hello")
    assert ended.returncode == 1 and ended.stdout == ""
    assert "is the server running?" in check_one_line(ended.stderr)


def test_refused_by_the_server(server: Server) -> None:
    ended = cli("chat", "--url", f"{server.url}/v1", "--model-name", "nope", "--quick", "Hello")
    assert (
        ended.returncode == 1
        and "404" in check_one_line(ended.stderr)
        and "`nope` does not exist" in ended.stderr
    )


APIS = (
    AdminApi(AdminOptions(profile_directory=Path()), ApiSetup(None)),
    LoRAApi(LoRAOptions(), ApiSetup(None)),
    WorkersApi(WorkerOptions(), ApiSetup(None)),
    TokenizerInfoApi(None, ApiSetup(None)),
)
SPECS = (ADMIN, LORA, WORKERS, TOKENIZER_INFO)


def test_a_route_that_is_off_says_what_turns_it_on(server: Server) -> None:
    for api, spec in zip(APIS, SPECS, strict=True):
        assert spec.switches.keys() == {route.path for route in api.routes()}
        for path, flags in spec.switches.items():
            told = HTTP.get(server.url + path)
            assert told.status_code == 404
            assert (
                told.json()["error"]["message"]
                == f"Not Found: {path} is off; the server's flag {flags} turns it on"
            )
            assert make_parser(command_setup("serve")).parse_settings(flags.split(), {})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["serve", "--max-num-sequences", "3"],
            "unknown flag --max-num-sequences, did you mean '--max-num-seqs'?",
        ),
        (["serve", "--max-model-len", "many"], "'many' is not a number"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--tool-call-parser", "hermis"], "did you mean 'hermes'?"),
        (["plugins", "show", "tool_parser:hermis"], "did you mean 'hermes'?"),
        (["plugins", "why", "toolparser"], "did you mean 'tool_parser'?"),
        (["serv"], "there is no command 'serv', did you mean 'serve'?"),
        (["chat", "--quik", "x"], "did you mean '--quick'?"),
        (["run-batch", "--input-fle", "x"], "did you mean '--input-file'?"),
    ],
)
def test_wrong_usage(words: list[str], told: str) -> None:
    ended = cli(*words)
    assert ended.returncode == 2 and ended.stdout == "" and told in check_one_line(ended.stderr)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        (["nowhere/at/all.gguf"], {}, "nowhere/at/all.gguf"),
        (["GOOD", "--max-model-len", "1000000"], {}, "max_model_len"),
        (["GOOD", "--port", "70000"], {}, "port"),
        (["GOOD", "--sampler", "torhc"], {}, "torhc"),
        (["GOOD", "--sampler.torch.nothing", "1"], {}, "nothing"),
        (["GOOD", "--kv-cache-memory-bytes", "4096"], {}, "kv_cache_memory_bytes"),
        (["GOOD"], {"PEGBOARD_PLUGINS": "pegboard-model-source-local"}, "weight_loader"),
        (["GOOD"], {"PEGBOARD_PLUGINS": "ALL BUT THE SAMPLER"}, "sampler"),
        (["GOOD"], {"PEGBOARD_LOG_LEVEL": "loud"}, "PEGBOARD_LOG_LEVEL"),
    ],
    ids=[
        "no model",
        "long context",
        "port",
        "sampler",
        "option",
        "small cache",
        "no plugins",
        "no sampler",
        "log level",
    ],
)
def test_what_stops_the_start_is_told(
    smollm2_gguf: Path, tmp_path: Path, words: list[str], env: dict[str, str], told: str
) -> None:
    """Exit status 2 for a mistake in the settings, else 1, and one line that names the cause. No
    process and no file remains."""
    env = dict(env)
    if env.get("PEGBOARD_PLUGINS") == "ALL BUT THE SAMPLER":
        names = {
            entry.distribution for entry in scan_path(sys.path).entries if entry.kind != "sampler"
        }
        env["PEGBOARD_PLUGINS"] = ",".join(sorted(names))
    words = [str(smollm2_gguf) if word == "GOOD" else word for word in words]
    flags = [] if "--port" in words else ["--port", "0"]
    ended = cli("serve", *words, *flags, TMPDIR=str(tmp_path), **env)
    is_setting = told in (
        "max_model_len",
        "port",
        "torhc",
        "nothing",
        "kv_cache_memory_bytes",
        "PEGBOARD_LOG_LEVEL",
    )
    assert ended.returncode == (2 if is_setting else 1), ended.stderr
    assert told in check_one_line(ended.stderr)
    assert list(tmp_path.iterdir()) == []


def test_deep_temporary_folder(tmp_path: Path) -> None:
    """The path of a socket can have about a hundred bytes. A deeper folder is not used for it."""
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    ended = cli("serve", "nowhere.gguf", TMPDIR=str(deep))
    assert ended.returncode == 1 and "nowhere.gguf" in check_one_line(ended.stderr)
    assert list(deep.iterdir()) == []

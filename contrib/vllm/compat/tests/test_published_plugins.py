"""Plugins for vLLM that others have published run unchanged.

Opt-in: PEGBOARD_TEST_VLLM_PLUGINS names a folder with the packages, without vLLM and its libraries:

    pip install --no-deps --target FOLDER vllm-sbw sbw raif-vllm raif-format warpscale-vllm \
        pping-lang duckdb fastapi annotated-doc vllm-openttt

docs/vllm_scripts.md has the versions and the results. A package that is not in the folder is
skipped.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pegboard_vllm_compat import finder
from pegboard_vllm_compat.parser_stream import Answer
from pegboard_vllm_compat.serve import with_plugins

from pegboard import SamplingParams
from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard.interfaces.tokenizer import Vocabulary

FOLDER = os.environ.get("PEGBOARD_TEST_VLLM_PLUGINS")
pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="PEGBOARD_TEST_VLLM_PLUGINS names no folder"),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def packages(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "raif")


def needs(*modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not in the folder")


def test_vllm_sbw(checkpoints: dict[str, str]) -> None:
    """A watermark that is strong enough changes every answer, and one of strength 0 none."""
    needs("vllm_sbw", "sbw")
    from pegboard_vllm_compat.offline import LLM

    def tokens(llm: LLM, **extra: float) -> list[list[int]]:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, extra_args=extra)
        outputs = llm.generate(["Hello", "Good day"], params)
        return [output.outputs[0].token_ids for output in outputs]

    plain = tokens(LLM(checkpoints["MODEL"]))
    llm = LLM(checkpoints["MODEL"], logits_processors=["vllm_sbw:SBWLogitsProcessor"])
    assert tokens(llm, delta=0.0) == plain
    for marked, other in zip(tokens(llm, delta=50.0), plain, strict=True):
        assert marked != other


def test_raif_vllm() -> None:
    """Its general plugin registers a tool parser. A stream has the name of the call first."""
    needs("raif_vllm", "raif")
    words = with_plugins(["model", "--tool-call-parser", "raif", "--shadow"])
    plugins = runpy.run_path(words[-1])
    (make,) = [one for one in plugins.values() if getattr(one, "plugin", "") == "tool_parser:raif"]
    tools = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)
    text = "city=Paris\ndays=2\n</raif>"
    for is_streamed in (False, True):
        vocabulary = Vocabulary((b"a",), frozenset(), ())
        parser = make(None, OutputParserSetup(vocabulary, tools, is_streamed=is_streamed))
        first = parser.feed(text[:4], ())
        events = first + parser.feed(text[4:], ()) + parser.finish()
        answer = Answer(events)
        assert [call.name for call in answer.calls] == ["weather"]
        assert json.loads(answer.calls[0].arguments) == {"city": "Paris", "days": 2}
        assert [call.name for call in Answer(first).calls] == ["weather"] * is_streamed


def test_a_server(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """warpscale-vllm and pping-lang measure, and vllm-openttt adds its header, to answers with the
    watermark of vllm-sbw."""
    needs("warpscale_vllm", "vllm_openttt", "pping_lang", "fastapi", "duckdb", "vllm_sbw", "sbw")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "pegboard_vllm_compat", "serve", checkpoints["MODEL"]]
    words += ["--port", str(port), "--middleware", "vllm_openttt.TTTPSMiddleware"]
    words += ["--logits-processors", "vllm_sbw:SBWLogitsProcessor"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{FOLDER}",
        "WS_VLLM_SINK": f"file://{tmp_path}/warpscale",
        "WS_VLLM_SINK_FLUSH_INTERVAL_S": "0.05",
        "PPING_LANG_DB_PATH": str(tmp_path / "pping/local"),
        "PPING_LANG_DISABLE_NVML": "1",
        "PPING_LANG_DISABLE_API": "1",
        "PPING_LANG_FLUSH_INTERVAL_S": "0.1",
    }
    url = f"http://127.0.0.1:{port}"

    def complete(**extra: float) -> tuple[str, Any]:
        body = {"prompt": "Hi", "max_tokens": 6, "temperature": 0, "vllm_xargs": extra}
        content = json.dumps({**body, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", content, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["text"], answer.headers

    with subprocess.Popen(words, env=environment) as server:
        try:
            wait_for(url, server)
            plain, headers = complete(delta=0.0)
            marked, _ = complete(delta=50.0)
        finally:
            server.terminate()
    assert plain != marked
    assert headers["X-TTTPS-Status"] == "degraded", "there is no server for its timestamps"
    lines = (tmp_path / "warpscale").read_text("utf-8").splitlines()
    records: dict[str, list[Any]] = {}
    for record in map(json.loads, lines):
        records.setdefault(record["type"], []).append(record)
    assert [one["NumGenerationTokens"] for one in records["request_stats"]] == [6, 6]
    assert records["scheduler_sample"][-1]["NumRunning"] == 0
    files = [file for file in (tmp_path / "pping").rglob("*") if file.is_file()]
    assert any("vllm" in file.read_text("utf-8", "replace") for file in files)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            assert server.poll() is None
            time.sleep(0.1)
    raise AssertionError("the server did not start")


def test_what_the_table_of_plugins_says() -> None:
    needs("warpscale_vllm", "raif_vllm")
    from pegboard_vllm_compat.entry_points import table

    assert any(isinstance(one, finder.VllmFinder) for one in sys.meta_path)
    assert "warpscale = warpscale_vllm.stat_logger:WarpscaleStatLogger  (warpscale-vllm)" in table()

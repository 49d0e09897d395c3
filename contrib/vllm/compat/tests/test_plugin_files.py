"""Files and classes in the form of vLLM's plugins."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pegboard_vllm_compat.bridge import Adapted, write
from pegboard_vllm_compat.dense_batch import DenseBatch
from pegboard_vllm_compat.entry_points import general, table
from pegboard_vllm_compat.logits_adapter import VllmProcessor
from pegboard_vllm_compat.logits_interface import (
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)
from pegboard_vllm_compat.parser_adapter import VllmReasoningParser, VllmToolParser
from pegboard_vllm_compat.resolver_adapter import VllmResolver
from pegboard_vllm_compat.serve import with_plugins

from pegboard import LLM, SamplingParams
from pegboard.errors import ConfigError, UsageError
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard.interfaces.lora_resolver import LoRAResolverSetup
from pegboard.interfaces.output_parser import (
    Content,
    OutputParserSetup,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard_testing.fake_limits import fake_limits

HERE = Path(__file__).parent
PARSERS = str(HERE / "vllm_parsers.py")
SETUP = OutputParserSetup(Vocabulary((b"a", b"b", b""), frozenset({2}), (2,)))


class Tool(VllmToolParser):
    target = PARSERS
    name = "example"
    shadow = True


class Thought(VllmReasoningParser):
    target = PARSERS
    name = "example"
    shadow = True


def events(parser: Any, *pieces: str) -> list[Any]:
    return [event for piece in pieces for event in parser.feed(piece, ())] + parser.finish()


@pytest.mark.usefixtures("vllm")
def test_a_tool_parser() -> None:
    parsed = events(Tool(None, SETUP), 'Well <call>{"name": "f", ', '"arguments": {"x": 1}}')
    assert parsed[0] == Content("Well ")
    assert isinstance(parsed[1], ToolCallStart) and parsed[1].name == "f"
    assert parsed[2] == ToolCallArguments(0, '{"x": 1}')
    assert events(Tool(None, SETUP), "plain") == [Content("plain")]
    assert events(Tool(None, SETUP), "<call>broken") == [Content("<call>broken")]


@pytest.mark.usefixtures("vllm")
def test_a_reasoning_parser() -> None:
    parser = Thought(None, SETUP)
    assert parser.reasoning_end() == ("</why>",)
    assert events(parser, "<why>so", "</why>yes") == [Reasoning("so"), Content("yes")]
    assert events(Thought(None, SETUP), "<why>never ends") == [Reasoning("never ends")]


class Recorder(LogitsProcessor):
    """Remembers what it is told."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.updates: list[BatchUpdate | None] = []
        self.outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        for index, _, _, output in batch_update.added if batch_update else ():
            self.outputs[index] = output

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + torch.arange(len(logits))[:, None]


class Adapter(VllmProcessor):
    target = f"{__name__}:Recorder"
    shadow = True


def row(place: int) -> AddedRow:
    return AddedRow(place, SamplingParams(), np.array([7]), np.array([8]))


@pytest.mark.usefixtures("vllm")
def test_rows_become_a_batch_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this())
    adapter = Adapter(None, LogitsProcessorSetup(fake_limits(), "cpu", lambda: SETUP.vocabulary))
    assert adapter.argmax_invariant
    recorder = adapter._processor

    def apply(*rows: int) -> list[float]:
        logits = torch.zeros(len(rows), 3)
        return adapter.apply(logits, torch.tensor(rows), torch.zeros(len(rows)), list)[
            :, 0
        ].tolist()

    adapter.update([row(0), row(2), row(5)], np.array([], int))
    assert apply(2, 5, 0) == [1, 2, 0]
    adapter.extend(np.array([2]), [[9]])
    assert recorder.outputs == {0: [8], 1: [8, 9], 2: [8]}
    assert apply(5) == [2]
    adapter.update([row(7)], np.array([]))
    adapter.update([], np.array([0, 2, 7]))
    assert apply(5) == [0]
    first, second, third = recorder.updates
    assert first is not None and [one[0] for one in first.added] == [0, 1, 2]
    assert second is None
    assert third is not None and (third.batch_size, third.removed, third.added) == (1, [1], [])
    assert [move[:2] for move in third.moved] == [(2, 0)]


@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=6), max_size=12))
def test_a_dense_batch_follows_its_updates(steps: list[list[tuple[bool, int]]]) -> None:
    """What a processor learns from the updates is what the batch is."""
    batch = DenseBatch()
    seen: dict[int, int] = {}
    for step in steps:
        gone = [place for is_new, place in step if not is_new]
        new = [
            place
            for place in dict.fromkeys(place for is_new, place in step if is_new)
            if place not in batch.index or place in gone
        ]
        removed, places, moved = batch.change(gone, new)
        rows = dict(zip(places, new, strict=True))
        added = [(place, rows[place], None, []) for place in places]
        update = BatchUpdate(len(batch), removed, added, moved)
        process_dict_updates(seen, update, lambda params, prompt, output: params)
        assert seen == {place: each for each, place in batch.index.items()}
        assert sorted(seen) == list(range(len(batch)))


def _this() -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(Recorder=Recorder)


@pytest.mark.usefixtures("vllm")
def test_drafts_are_refused() -> None:
    limits = fake_limits(max_drafts=2)
    with pytest.raises(ConfigError, match="speculative decoding"):
        Adapter(None, LogitsProcessorSetup(limits, "cpu", lambda: SETUP.vocabulary))


@pytest.mark.usefixtures("vllm")
def test_the_flags_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    words = with_plugins(
        ["model", "--tool_parser_plugin", PARSERS, "--tool-call-parser", "example"]
        + [f"--reasoning-parser-plugin={PARSERS}", "--shadow"]
        + ["--logits-processors", "vllm_processor:OnlyB", "--port", "1"]
    )
    assert words[:-1] == ["model", "--tool-call-parser", "example", "--port", "1"] + [
        "--logits-processors",
        "vllm-OnlyB",
        "--plugin",
    ]
    text = Path(words[-1]).read_text("utf-8")
    assert "special_tokens = True" in text and "reasoning_parser:example" in text
    with pytest.raises(UsageError, match="--tool-parser-plugin"):
        with_plugins(["--tool-parser-plugin", "--port", "--shadow"])
    with pytest.raises(ConfigError, match="no parser"):
        with_plugins(["--tool-parser-plugin", str(HERE / "tiny.py")])


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with plugins of vLLM."""
    info = folder / "b_processor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: b-processor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.logits_processors]\nb = vllm_processor:OnlyB\n"
        "[vllm.general_plugins]\nbroken = vllm_processor:gone\nlora = vllm_processor:register\n"
    )
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("vllm")
def test_a_general_plugin_registers_a_resolver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that fails is left out."""
    monkeypatch.syspath_prepend(str(HERE))
    install(tmp_path, monkeypatch)
    assert [target for target, _ in general()] == ["vllm_processor:gone", "vllm_processor:register"]
    words = with_plugins(["here", "--shadow"])
    assert words[:5] == ["here", "--lora-resolvers", "folder", "--logits-processors", "vllm-OnlyB"]
    assert "base_model = 'here'" in Path(words[-1]).read_text("utf-8")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert not list(general())

    class Resolver(VllmResolver):
        target = "vllm_processor:register"
        name = "folder"
        shadow = True
        base_model = "here"

    resolver = Resolver(None, LoRAResolverSetup(lambda *given: tmp_path))
    assert asyncio.run(resolver.resolve("sql")) == Path("/adapters/here/sql")
    assert asyncio.run(resolver.resolve("unknown")) is None


@pytest.mark.usefixtures("vllm")
def test_an_installed_logits_processor_is_used(
    tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the table shows it."""
    monkeypatch.syspath_prepend(str(HERE))
    install(tmp_path, monkeypatch)
    assert "  b = vllm_processor:OnlyB  (b-processor)" in table()
    from pegboard_vllm_compat.offline import LLM as VllmLLM

    llm = VllmLLM(checkpoints["MODEL"])
    params = SamplingParams(max_tokens=3)
    assert llm.generate("Hello", params)[0].outputs[0].token_ids == [33] * 3
    with pytest.raises(ValueError, match="letter must not be wrong"):
        llm.generate("Hello", SamplingParams(extra_args={"letter": "wrong"}))


@pytest.mark.usefixtures("vllm")
def test_the_file_is_one_of_pegboard(
    checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    file = write([Adapted("logits_processor", "only-b", "vllm_processor:OnlyB")], shadow=True)
    llm = LLM(checkpoints["MODEL"], plugin_files=[file], logits_processors=["only-b"])
    assert llm.generate("Hi", SamplingParams(max_tokens=2))[0].outputs[0].text == "BB"


@pytest.mark.slow
def test_a_server(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """All processes run the files: the answer is made of B, and wrong parameters are refused."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "pegboard_vllm_compat", "serve", checkpoints["MODEL"]]
    words += ["--port", str(port), "--tool-parser-plugin", PARSERS, "--tool-call-parser"]
    words += ["example", "--logits-processors", "vllm_processor:OnlyB"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    url = f"http://127.0.0.1:{port}"

    def post(**more: Any) -> Any:
        content = json.dumps({**body, **more}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", content, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    environment = {**os.environ}
    environment["PYTHONPATH"] = f"{HERE}:{environment.get('PYTHONPATH', '')}"
    with subprocess.Popen(words, env=environment) as server:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{url}/health").close()
                    break
                except OSError:
                    assert server.poll() is None
                    time.sleep(0.1)
            assert post()["choices"][0]["message"]["content"] == "BBB"
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(vllm_xargs={"letter": "wrong"})
        finally:
            server.terminate()

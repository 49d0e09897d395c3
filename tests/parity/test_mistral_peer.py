"""The tokenizer `mistral` compared with vLLM's tokenizer mode of that name: the same token ids for
the same chats, in every version.

Opt-in: PEGBOARD_PEER_VLLM names the Python of an environment that has vLLM (CPU).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pegboard_tokenizer_mistral.tokenizer import MistralCommonTokenizer

from pegboard.interfaces.tokenizer import Chat, TokenizerSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload

PEER = os.environ.get("PEGBOARD_PEER_VLLM")
VOCABULARIES = Path(__file__).parents[2] / "plugins/tokenizer/mistral/tests/conftest.py"
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "größer"}
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "日本 [INST]"}],
}
CALL = {
    "id": "a1B2c3D4e",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a1B2c3D4e", "name": "get_weather", "content": "sunny"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA},
    }
]
CHATS: list[dict[str, Any]] = [
    {"messages": [USER], "tools": None, "continues": False},
    {"messages": [SYSTEM, USER, ANSWER, PARTS], "tools": None, "continues": False},
    {"messages": [SYSTEM, USER, CALLS, RESULT], "tools": TOOLS, "continues": False},
    {"messages": [USER, CALLS, RESULT, ANSWER, USER], "tools": TOOLS, "continues": False},
    {"messages": [USER, ANSWER], "tools": None, "continues": True},
]
TEXTS = ["hello world", " the  größer 日本\n\t", "", "👩‍🚀 {}"]

pytestmark = pytest.mark.skipif(PEER is None, reason="PEGBOARD_PEER_VLLM names no Python with vLLM")


@pytest.fixture(scope="module")
def write_tekken() -> Callable[..., Path]:
    module = ModuleType("vocabularies")
    exec(compile(VOCABULARIES.read_text("utf-8"), str(VOCABULARIES), "exec"), module.__dict__)
    write: Callable[..., Path] = module.tekken
    return write


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_same_token_ids_as_vllm(
    tmp_path: Path, write_tekken: Callable[..., Path], version: str
) -> None:
    assert PEER is not None
    write_tekken(tmp_path, version)
    payload = TokenizerPayload("hf", tmp_path)
    checkpoint = Checkpoint(
        format="x", path=tmp_path, config={}, architectures=(), tensors={}, tokenizer=payload
    )
    ours = MistralCommonTokenizer(None, TokenizerSetup(checkpoint))
    job = json.dumps({"folder": str(tmp_path), "chats": CHATS, "texts": TEXTS})
    script = Path(__file__).with_name("vllm_mistral.py")
    done = subprocess.run(
        [PEER, str(script)], input=job, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout)
    for chat, ids in zip(CHATS, theirs["chats"], strict=True):
        asked = Chat(
            messages=chat["messages"],
            tools=chat["tools"],
            add_generation_prompt=not chat["continues"],
            continue_final_message=chat["continues"],
        )
        assert list(ours.render(asked).token_ids or ()) == ids, chat
    for text, (ids, decoded) in zip(TEXTS, theirs["texts"], strict=True):
        assert ours.encode(text, add_special_tokens=True) == ids
        assert ours.decode(ids, skip_special_tokens=True) == decoded == text

"""Pictures with a real language model: the texts of transformers, through `LLM.chat` and over HTTP
with the official client, with streams, tools and JSON schemas."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from vision_files import NUM_ROWS, write_vision

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_process import MODEL, Server, install_probe

from pegboard import LLM, SamplingParams
from pegboard_testing.contract_multimodal_processor import random_image

pytestmark = pytest.mark.real_model

GREEDY = SamplingParams(temperature=0, max_tokens=24)
WIDE, TALL = random_image(60, 30, seed=1), random_image(31, 64, seed=2)
CHATS: dict[str, list[Any]] = {
    "one image": [WIDE, "What is in this picture?"],
    "another image": [TALL, "What is in this picture?"],
    "two images": ["Compare this: ", WIDE, " with this: ", TALL, " What is different?"],
    "no image": ["What is the capital of France?"],
}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
ANSWER = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "count": COUNT},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "tell", "description": "Tell what is there.", "parameters": ANSWER},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def peer(smollm2_gguf: Path, folder: Path) -> tuple[Any, Any]:
    """transformers' model and processor. Their files are in `folder`."""
    return write_vision(smollm2_gguf, folder)


def messages(parts: list[Any], *, is_remote: bool = False) -> Any:
    """Return a chat of texts and images. is_remote: the images are URLs."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif is_remote:
            file = io.BytesIO()
            part.save(file, "PNG")
            data = base64.b64encode(file.getvalue()).decode()
            url = {"url": f"data:image/png;base64,{data}"}
            content.append({"type": "image_url", "image_url": url})
        else:
            content.append({"type": "image_pil", "image_pil": part})
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def outputs(peer: Any, folder: Path) -> dict[str, Any]:
    """The answers of an engine in this process. All chats run together."""
    settings: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 27}
    with LLM(str(folder), dtype="float32", **settings) as llm:
        every = llm.chat([messages(parts) for parts in CHATS.values()], GREEDY, use_tqdm=False)
    return dict(zip(CHATS, every, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHATS)
def test_the_text_of_transformers(peer: Any, outputs: dict[str, Any], name: str) -> None:
    """Every token is the most likely one under transformers, given those before it."""
    model, processor = peer
    parts = CHATS[name]
    images = [part for part in parts if not isinstance(part, str)]
    marked = "".join(part if isinstance(part, str) else "<image>" for part in parts)
    text = f"<|im_start|>user\n{marked}<|im_end|>\n<|im_start|>assistant\n"
    given = dict(processor(text=text, images=images or None, return_tensors="pt"))
    prompt = given["input_ids"][0].tolist()
    output = outputs[name]
    assert output.prompt_token_ids == prompt
    assert prompt.count(16) == NUM_ROWS * len(images)
    answer = list(output.outputs[0].token_ids)
    ids = torch.tensor([prompt + answer[:-1]])
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        logits = model(**given).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == answer
    decoded = processor.tokenizer.decode(answer, skip_special_tokens=True)
    assert output.outputs[0].text == decoded


def test_images_change_the_text(outputs: dict[str, Any]) -> None:
    assert len({output.outputs[0].text for output in outputs.values()}) == len(CHATS)


@pytest.fixture(scope="module")
def client(
    peer: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    place = tmp_path_factory.mktemp("server")
    probe = install_probe(tmp_path_factory.mktemp("probe"))
    settings = ("--dtype", "float32", "--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    compact = ("--structured-outputs-config", '{"disable_any_whitespace": true}')
    with Server(folder, place, *settings, *compact, probe=probe) as running:
        running.wait_until_ready()
        with running.client() as client:
            yield client
        running.wait_until_idle()
    running.check_nothing_left()


def fields(name: str) -> dict[str, Any]:
    chat = messages(CHATS[name], is_remote=True)
    return {"model": MODEL, "messages": chat, "temperature": 0, "max_tokens": GREEDY.max_tokens}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHATS)
def test_over_http(client: openai.OpenAI, outputs: dict[str, Any], name: str) -> None:
    """Whole and streamed."""
    expected = outputs[name].outputs[0].text
    answer = client.chat.completions.create(**fields(name))
    assert answer.choices[0].message.content == expected
    assert answer.usage.prompt_tokens == len(outputs[name].prompt_token_ids)
    chunks = client.chat.completions.create(**fields(name), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


@pytest.mark.slow
def test_a_schema(client: openai.OpenAI) -> None:
    schema = {"name": "answer", "schema": ANSWER}
    form: Any = {"type": "json_schema", "json_schema": schema}
    given = {**fields("two images"), "max_tokens": 60, "response_format": form}
    answer = client.chat.completions.create(**given)
    jsonschema.validate(json.loads(answer.choices[0].message.content), ANSWER)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tell"}}])
def test_a_tool(client: openai.OpenAI, choice: Any) -> None:
    """Its result is sent back in a chat whose first message has the image."""
    given = {**fields("one image"), "max_tokens": 80, "tools": [TOOL], "parallel_tool_calls": False}
    message = client.chat.completions.create(**given, tool_choice=choice).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "tell"
    jsonschema.validate(json.loads(call.function.arguments), ANSWER)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is so."}
    chat = [*given["messages"], message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(**{**given, "messages": chat}, tool_choice="none")
    assert last.choices[0].message.content and last.usage.prompt_tokens > NUM_ROWS

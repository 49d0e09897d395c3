"""Settings for prompts with images over HTTP: an adapter for all of them, and images that stay
where they are in a template for text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server
from test_media import IMAGES, messages, part, text_of, url_of

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from tiny_media import (
    NUM_TEXT_TOKENS,
    MediaReference,
    add_adapter,
    prompt,
    write_llava,
)

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
COUNT = 5


def expected(reference: MediaReference, *parts: Any) -> str:
    one = prompt(*parts)
    outputs: list[int] = []
    while len(outputs) < COUNT:
        outputs.append(int(reference.logprobs(one, outputs)[-1].argmax()))
    return " ".join(f"w{token}" for token in outputs if token < NUM_TEXT_TOKENS)


@pytest.mark.slow
def test_adapters_and_places(tmp_path: Path, probe: Path) -> None:
    before = write_llava(tmp_path)
    after = write_llava(tmp_path)
    adapter = add_adapter(after.model, tmp_path, "model.language_model")
    settings = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
    adapters = ("--enable-lora", "--default-mm-loras", json.dumps({"image": str(adapter)}))
    places = ("--chat-template", TEMPLATE, "--interleave-mm-strings")
    place = tmp_path / "server"
    place.mkdir()
    with Server(tmp_path, place, *settings, *adapters, *places, probe=probe) as running:
        url = f"{running.wait_until_ready().url}/v1/chat/completions"

        def asked(*parts: Any) -> str:
            body = {"messages": messages(*parts), "max_tokens": COUNT, "temperature": 0}
            return text_of(httpx.post(url, json={**body, "ignore_eos": True}, timeout=60))

        assert asked("w5 w6") == expected(before, 5, 6) != expected(after, 5, 6)
        answer = asked("w5", part(url_of(IMAGES[0])), "w6")
        assert answer == expected(after, 5, IMAGES[0], 6) != expected(before, 5, IMAGES[0], 6)
    running.check_nothing_left()

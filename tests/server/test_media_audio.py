"""Audio over HTTP: the official client, a file in a message, and the rows of one."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import soundfile
import torch
from server_process import Server
from test_media import messages, text_of

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import test_audio_parity as audio
from tiny_media import NUM_TEXT_TOKENS, MediaReference

KIND = "qwen2_audio"
SAMPLES = audio.tone(7_000, 3)
COUNT = 5


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return audio.write(KIND, tmp_path_factory.mktemp("audio"))


@pytest.fixture(scope="module")
def server(
    reference: MediaReference, tmp_path_factory: pytest.TempPathFactory, probe: Path
) -> Iterator[Server]:
    settings = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
    place = tmp_path_factory.mktemp("server")
    with Server(
        reference.directory, place, *settings, "--enable-mm-embeds", probe=probe
    ) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


@pytest.fixture(scope="module")
def expected(reference: MediaReference) -> str:
    """The text that transformers answers to the chat of the samples and two words."""
    one = audio.prompt(KIND, 1, SAMPLES, 7, 8, 3)
    outputs: list[int] = []
    while len(outputs) < COUNT:
        outputs.append(int(reference.logprobs(one, outputs)[-1].argmax()))
    return " ".join(f"w{token}" for token in outputs if token < NUM_TEXT_TOKENS)


def encoded() -> str:
    """The samples as a WAV file in base64."""
    file = io.BytesIO()
    soundfile.write(file, SAMPLES, audio.RATE, format="WAV", subtype="FLOAT")
    return base64.b64encode(file.getvalue()).decode()


PARTS: dict[str, Any] = {
    "input_audio": lambda: {"data": encoded(), "format": "wav"},
    "audio_url": lambda: {"url": f"data:audio/wav;base64,{encoded()}"},
}


@pytest.mark.parametrize("kind", PARTS)
def test_the_official_client(server: Server, expected: str, kind: str) -> None:
    client = server.client()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages({"type": kind, kind: PARTS[kind]()}, "w7 w8"),
        max_tokens=COUNT,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert (answer.choices[0].message.content or "").strip() == expected


def test_rows_in_place_of_audio(server: Server, reference: MediaReference, expected: str) -> None:
    given = reference.inputs(audio.prompt(KIND, SAMPLES))
    count = int((given["input_ids"] == audio.AUDIO).sum())
    with torch.no_grad():
        (rows,) = audio.their_rows(reference.model, given, [count])
    file = io.BytesIO()
    torch.save(rows[:count].clone(), file)
    part = {"type": "audio_embeds", "audio_embeds": base64.b64encode(file.getvalue()).decode()}
    body = {"messages": messages(part, "w7 w8"), "max_tokens": COUNT, "temperature": 0}
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json={**body, "ignore_eos": True}, timeout=60)
    assert text_of(answer) == expected

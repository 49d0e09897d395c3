"""Transcriptions over HTTP with a tiny Whisper: the answers of transformers' greedy search, from
the official client; long recordings; what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from pegboard_api_openai.recordings import cut
from server_process import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from tiny_media import NUM_TEXT_TOKENS, MediaReference
from tiny_whisper import RATE, SECONDS, SPECIAL, about, sound, write_whisper

BEGIN, EN, DE, TRANSLATE, TRANSCRIBE, BEFORE, NO_TIMES, FIRST = range(
    NUM_TEXT_TOKENS + 1, NUM_TEXT_TOKENS + 9
)
COUNT = 6


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(
    whisper: MediaReference, tmp_path_factory: pytest.TempPathFactory, probe: Path
) -> Iterator[Server]:
    settings = ("--dtype", "float32", "--kv-cache-memory-bytes", "8M", "--max-model-len", "96")
    limits = ("--max-upload-bytes", "400000", "--served-model-name", "w")
    place = tmp_path_factory.mktemp("server")
    with Server(whisper.directory, place, *settings, *limits, probe=probe) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def file_of(samples: np.ndarray, kind: str = "wav", rate: int = RATE) -> tuple[str, bytes]:
    file = io.BytesIO()
    more = {"subtype": "FLOAT"} if kind == "wav" else {}
    soundfile.write(file, samples, rate, format=kind, **more)
    return f"recording.{kind}", file.getvalue()


def posted(server: Server, path: str = "transcriptions", **form: Any) -> httpx.Response:
    files = {"file": form.pop("file")} if "file" in form else {"unused": None}
    if files == {"unused": None}:
        files = {name: (None, str(value)) for name, value in form.items()}
        form = {}
    data = {"max_completion_tokens": COUNT, **form}
    return httpx.post(f"{server.url}/v1/audio/{path}", data=data, files=files, timeout=60)


def greedy(whisper: MediaReference, samples: np.ndarray, prompt: list[int]) -> str:
    """The text that transformers answers. prompt: token ids; only the first ones are words."""
    words = [
        f"w{token}" if token < NUM_TEXT_TOKENS else SPECIAL[token - NUM_TEXT_TOKENS]
        for token in prompt
    ]
    one = {**about((samples, RATE)), "prompt": " ".join(words)}
    outputs: list[int] = []
    while len(outputs) < COUNT and NUM_TEXT_TOKENS not in outputs:
        outputs.append(int(whisper.logprobs(one, outputs)[-1].argmax()))
    return " ".join(f"w{token}" for token in outputs if token < NUM_TEXT_TOKENS)


def spoken(seconds: float, seed: int) -> np.ndarray:
    return sound(seconds, seed)[0]


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg"])
def test_the_answer_of_transformers(
    whisper: MediaReference, client: openai.OpenAI, kind: str
) -> None:
    samples = spoken(1.2, 1)
    name, content = file_of(samples, kind)
    heard, _ = soundfile.read(io.BytesIO(content), dtype="float32")
    answer = client.audio.transcriptions.create(
        model="w",
        file=(name, content),
        language="de",
        prompt="w7 w8",
        extra_body={"max_completion_tokens": COUNT},
    )
    assert answer.text == greedy(whisper, heard, [BEFORE, 7, 8, BEGIN, DE, TRANSCRIBE, NO_TIMES])
    assert answer.usage is not None and answer.usage.seconds == 2


def test_a_translation(whisper: MediaReference, server: Server) -> None:
    samples = spoken(1.0, 2)
    given = {"file": file_of(samples), "language": "german"}
    answer = posted(server, "translations", **given, to_language="en").json()
    assert answer["text"] == greedy(whisper, samples, [BEGIN, DE, TRANSLATE, NO_TIMES])
    wrong = posted(server, "translations", **given, to_language="de").json()["error"]
    assert wrong["param"] == "to_language" and "only en is possible" in wrong["message"]


def test_the_language_is_detected(whisper: MediaReference, server: Server) -> None:
    for seed in range(4):
        samples = spoken(1.0, seed)
        one = {**about((samples, RATE)), "prompt": "<|startoftranscript|>"}
        row = whisper.logprobs(one, [])[-1]
        code, name = ("en", "english") if row[EN] > row[DE] else ("de", "german")
        answer = posted(server, file=file_of(samples), response_format="verbose_json").json()
        assert answer["language"] == name
        given = posted(server, file=file_of(samples), language=code).json()
        assert given == posted(server, file=file_of(samples)).json()


def test_a_long_recording(whisper: MediaReference, server: Server) -> None:
    """It is cut where it is quiet, and the clips are computed side by side. The stream has their
    text in order."""
    samples = spoken(5.5, 3)
    clips = cut(samples, RATE, SECONDS)
    assert len(clips) > 2 and np.array_equal(np.concatenate([c.samples for c in clips]), samples)
    texts = [greedy(whisper, clip.samples, [BEGIN, EN, TRANSCRIBE, NO_TIMES]) for clip in clips]
    given = {"file": file_of(samples), "language": "en"}
    text = posted(server, **given, response_format="text").text.strip()
    assert text.split() == " ".join(texts).split() or text == "".join(texts).strip()
    assert posted(server, **given).json()["text"] == text
    lines = posted(server, **given, stream=True, stream_include_usage=True).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    pieces = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1]]
    assert "".join(pieces).strip() == text
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens"] == 4 * len(clips)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert len([reason for reason in reasons if reason]) == len(clips)


def test_times(server: Server) -> None:
    samples = spoken(3.0, 4)
    given = {"file": file_of(samples), "language": "en", "max_completion_tokens": 40}
    whole = posted(
        server, **given, response_format="verbose_json", **{"timestamp_granularities[]": "segment"}
    ).json()
    assert whole["task"] == "transcribe" and whole["duration"] == 3.0
    parts = whole["segments"]
    assert [part["id"] for part in parts] == [*range(len(parts))] and parts
    last = 0.0
    for part in parts:
        assert last <= part["start"] <= part["end"] <= 3.0
        assert part["avg_logprob"] < 0 and all(token < FIRST for token in part["tokens"])
        last = part["end"]
    assert "".join(part["text"] for part in parts).strip() == whole["text"]
    srt = posted(server, **given, response_format="srt")
    vtt = posted(server, **given, response_format="vtt")
    assert srt.text.startswith("1\n00:00:00,") and srt.text.count(" --> ") == len(parts)
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.") and vtt.text.count(" --> ") == len(parts)
    assert vtt.headers["content-type"].startswith("text/vtt")


def test_many_at_once(server: Server) -> None:
    files = [file_of(spoken(1.0, seed)) for seed in range(12)]
    alone = [posted(server, file=file, language="en").json() for file in files]
    with ThreadPoolExecutor(12) as threads:
        together = list(
            threads.map(lambda file: posted(server, file=file, language="en").json(), files)
        )
    assert alone == together


def test_a_seed(server: Server) -> None:
    given = {"file": file_of(spoken(1.0, 5)), "temperature": 1.5, "top_p": 0.9, "top_k": 50}
    one, two, other = (
        posted(server, **given, seed=seed, language="en").json()["text"] for seed in (1, 1, 2)
    )
    assert one == two != other


def test_bench(server: Server, tmp_path: Path) -> None:
    how = {"language": "en", "temperature": 1, "seed": 1}
    lines: list[str] = []
    for seed in range(30):
        name, content = file_of(spoken(1.0, seed))
        given = {"file": (name, content), **how, "max_completion_tokens": 4}
        if len(lines) < 3 and posted(server, **given).json()["text"]:
            (tmp_path / f"{seed}-{name}").write_bytes(content)
            path = str(tmp_path / f"{seed}-{name}")
            lines.append(json.dumps({"audio": path, "output_tokens": 4}))
    (tmp_path / "recordings.jsonl").write_text("\n".join(lines))
    words = ["--backend", "openai-audio", "--dataset-name", "custom", "--num-prompts", "3"]
    words += ["--dataset-path", str(tmp_path / "recordings.jsonl"), "--save-result"]
    result = benched(server, tmp_path, *words, "--extra-body", json.dumps(how))
    assert (result["completed"], result["failed"]) == (3, 0)
    assert 3 <= result["total_output_tokens"] <= 12 and result["total_input_tokens"] == 12


def benched(server: Server, folder: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pegboard", "bench", "serve", "--port", str(server.port)]
    place = ["--result-dir", str(folder), "--result-filename", "result.json"]
    ended = subprocess.run([*command, *words, *place], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "file", "file is required"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"temperature": "hot"}, "temperature", "expected a number, got 'hot'"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"language": "klingon"}, "language", "is not one that the model knows; it knows en, de"),
    ({"response_format": "xml"}, "response_format", "got 'xml'"),
    ({"response_format": "srt", "stream": "true"}, "response_format", "cannot be streamed"),
    ({"stream_include_usage": "true"}, "stream_include_usage", "needs stream"),
    ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "needs response_format"),
    (
        {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
        "timestamp_granularities",
        "times of words are not known",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"vllm_xargs": "{"}, "vllm_xargs", "is not JSON"),
    ({"vllm_xargs": '{"a": 1}'}, "vllm_xargs", "'a'"),
    ({"model": "other"}, "model", "does not exist"),
]


@pytest.mark.parametrize(("fields", "parameter", "message"), WRONG, ids=str)
def test_what_is_refused(
    server: Server, fields: dict[str, Any], parameter: str, message: str
) -> None:
    form = {"file": file_of(spoken(0.5, 6)), **fields} if fields else {"model": "w"}
    answer = posted(server, **form)
    error = answer.json()["error"]
    assert answer.status_code == (404 if parameter == "model" else 400)
    assert message in error["message"] and error["param"] == parameter


def test_files_that_cannot_be_read(server: Server) -> None:
    _, content = file_of(spoken(0.5, 7))
    for wrong in (b"", b"RIFF", content[:40], b"\x00" * 1000, b"hello" * 100):
        answer = posted(server, file=("recording.wav", wrong))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "file"
    many = [("file", ("a.wav", content)), ("file", ("b.wav", content))]
    url = f"{server.url}/v1/audio/transcriptions"
    assert httpx.post(url, files=many).status_code == 400
    assert "unknown file 'sound'" in httpx.post(url, files={"sound": ("a", b"a")}).text
    body = httpx.post(url, json={"model": "w"})
    assert body.status_code == 400 and "multipart/form-data" in body.text
    for header in ("multipart/form-data", "multipart/form-data; boundary=x"):
        broken = httpx.post(url, content=b"abc", headers={"content-type": header})
        assert broken.status_code == 400 and broken.json()["error"]["param"] == "file"
    large = posted(server, file=file_of(spoken(6.5, 8)))
    assert large.status_code == 413 and "max_upload_bytes" in large.text


def test_a_model_that_only_chats_is_named(server: Server) -> None:
    """Whisper has no chat, and needs a recording."""
    chat = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "w1"}]}
    )
    assert chat.status_code == 400
    text = httpx.post(f"{server.url}/v1/completions", json={"prompt": "w1", "max_tokens": 1})
    assert text.status_code == 400 and "the prompt has 0" in text.text

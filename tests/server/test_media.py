"""Images over HTTP: the answers of the model's own process, from the official client; what is
refused; and that other requests go on."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import Server, cli

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from tiny_media import NUM_TEXT_TOKENS, MediaReference, prompt, rows_of, write_llava

from pegboard_testing.contract_multimodal_processor import random_image

MORE = ("--plugins-enable", "api:admin", "--trust-request-mm-kwargs", "--enable-mm-embeds")
IMAGES = [random_image(40, 20, seed=1), random_image(13, 50, seed=2)]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures that requests may name."""
    path = tmp_path_factory.mktemp("pictures")
    for number, image in enumerate(IMAGES):
        image.save(path / f"{number}.png")
    return path


@pytest.fixture(scope="module")
def server(
    llava: MediaReference, folder: Path, tmp_path_factory: pytest.TempPathFactory, probe: Path
) -> Iterator[Server]:
    settings = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
    media = ("--allowed-local-media-path", str(folder), "--limit-mm-per-prompt", '{"image": 2}')
    place = tmp_path_factory.mktemp("server")
    with Server(llava.directory, place, *settings, *media, *MORE, probe=probe) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


def url_of(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def messages(*parts: Any) -> list[dict[str, Any]]:
    texts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    return [{"role": "user", "content": texts}]


def asked(server: Server, *parts: Any, **fields: Any) -> httpx.Response:
    body = {"messages": messages(*parts), "max_tokens": 5, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def expected(llava: MediaReference, *parts: Any, count: int = 5) -> str:
    """The text that transformers answers to the chat of these words and images. Only the first
    tokens are words."""
    one = prompt(1, *parts, 3)
    outputs: list[int] = []
    while len(outputs) < count:
        outputs.append(int(llava.logprobs(one, outputs)[-1].argmax()))
    return " ".join(f"w{token}" for token in outputs if token < NUM_TEXT_TOKENS)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"]).strip()


def test_the_official_client(server: Server, llava: MediaReference) -> None:
    client = server.client()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages("w7", part(url_of(IMAGES[0])), "w8", part(url_of(IMAGES[1]))),
        max_tokens=5,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    text = (answer.choices[0].message.content or "").strip()
    assert text == expected(llava, 7, IMAGES[0], 8, IMAGES[1])
    assert answer.usage is not None and answer.usage.prompt_tokens == 4 + 2 * 16


def test_a_file_and_its_data_are_the_same_item(
    server: Server, llava: MediaReference, folder: Path
) -> None:
    by_data = asked(server, part(url_of(IMAGES[1])), "w9", ignore_eos=True)
    path = folder / "1.png"
    by_file = asked(server, part(path.as_uri()), "w9", ignore_eos=True)
    assert text_of(by_data) == text_of(by_file) == expected(llava, IMAGES[1], 9)


def rows_part(rows: Any, **more: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(rows, file)
    text = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_embeds", "image_embeds": text, **more}


def test_rows_in_place_of_an_image(server: Server, llava: MediaReference) -> None:
    """They are answered as the image is."""
    rows = rows_of(llava, IMAGES[0])[0]
    answer = asked(server, "w7", rows_part(rows), "w8", part(url_of(IMAGES[1])), ignore_eos=True)
    assert text_of(answer) == expected(llava, 7, IMAGES[0], 8, IMAGES[1])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "image_embeds"}, "base64 of a tensor"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "safetensors file"),
        (rows_part(torch.ones(16, 33)), "the shape [tokens, 32]"),
        (rows_part(torch.full((16, 32), float("nan"))), "finite"),
        (rows_part([1, 2]), "one dense tensor"),
        (rows_part(torch.ones(300, 32)), "tokens, with those of its media"),
        ({**rows_part(torch.ones(16, 32)), "type": "audio_embeds"}, "base64 of a tensor"),
    ],
)
def test_rows_that_are_refused(server: Server, given: dict[str, Any], told: str) -> None:
    answer = asked(server, "w7", given)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]


def test_a_stream(server: Server, llava: MediaReference) -> None:
    client = server.client()
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages(part(url_of(IMAGES[0])), "w4"),
        max_tokens=5,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text.strip() == expected(llava, IMAGES[0], 4)


def test_responses(server: Server, llava: MediaReference) -> None:
    content = [
        {"type": "input_image", "image_url": url_of(IMAGES[0])},
        {"type": "input_text", "text": "w4"},
    ]
    body = {"input": [{"role": "user", "content": content}], "temperature": 0, "store": False}
    answer = httpx.post(
        f"{server.url}/v1/responses", json={**body, "max_output_tokens": 5}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    (message,) = answer.json()["output"]
    text = message["content"][0]["text"].strip()
    assert expected(llava, IMAGES[0], 4).startswith(text) and text


def test_messages(server: Server, llava: MediaReference) -> None:
    """Anthropic's API."""
    data = url_of(IMAGES[0]).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "w4"}]
    body = {
        "model": server.client().models.list().data[0].id,
        "max_tokens": 5,
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text = answer.json()["content"][0]["text"].strip()
    assert expected(llava, IMAGES[0], 4).startswith(text) and text
    source["type"] = "file"
    refused = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert refused.status_code == 400 and "messages.0.content.0.source" in refused.text


def test_the_name_of_an_item(server: Server) -> None:
    first = asked(server, part(url_of(IMAGES[0]), uuid="harbour"), "w4")
    other = asked(server, part(url_of(IMAGES[1]), uuid="harbour"), "w4")
    assert text_of(first) == text_of(other), "an item with this name is there"


GIF = "data:image/gif;base64,R0lGODlhAQABAAAAACw="
NAMED = {
    "not an image": (part("data:text/plain;base64,aGVsbG8="), "messages[0].content[0]"),
    "truncated": (part(GIF), "messages[0].content[0]"),
    "another scheme": (part("ftp://example.com/a.png"), "messages[0].content[0]"),
    "an address of this host": (part("http://127.0.0.1:1/a.png"), "messages[0].content[0]"),
    "a file elsewhere": (part("file:///etc/hostname"), "messages[0].content[0]"),
    "video": ({"type": "video_url", "video_url": {"url": "data:x"}}, "messages[0].content[0]"),
    "no url": (part(""), "messages[0].content[0]"),
}


@pytest.mark.parametrize(("wrong", "parameter"), NAMED.values(), ids=NAMED.keys())
def test_a_wrong_item_is_named(server: Server, wrong: dict[str, Any], parameter: str) -> None:
    response = asked(server, wrong, "w4")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, parameter), error
    assert server.status("/health") == 200


def test_too_many_items(server: Server) -> None:
    response = asked(server, *[part(url_of(IMAGES[0]))] * 3)
    assert response.status_code == 400
    assert "at most 2 may be in one" in response.json()["error"]["message"]


def test_options_of_the_processor(server: Server) -> None:
    plain = asked(server, part(url_of(IMAGES[0])), "w4", logprobs=True)
    dark = asked(
        server,
        part(url_of(IMAGES[0])),
        "w4",
        logprobs=True,
        mm_processor_kwargs={"rescale_factor": 0.001},
    )
    values = [
        one.json()["choices"][0]["logprobs"]["content"][0]["logprob"] for one in (plain, dark)
    ]
    assert values[0] != values[1]
    refused = asked(server, part(url_of(IMAGES[0])), mm_processor_kwargs={"sharpen": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "mm_processor_kwargs"


def test_the_cache_is_emptied(server: Server) -> None:
    named = {"image_url": {"url": url_of(IMAGES[0])}, "type": "image_url", "uuid": "kept"}
    known = {**named, "image_url": None}
    assert text_of(asked(server, named, "w4")) == text_of(asked(server, known, "w4"))
    assert httpx.post(f"{server.url}/reset_mm_cache").status_code == 200
    refused = asked(server, known, "w4")
    assert refused.status_code == 400 and "in the cache; send it" in refused.text


def test_nothing_is_left(server: Server) -> None:
    server.wait_until_idle()


@pytest.mark.parametrize("num_items", [1, 2])
def test_bench(server: Server, tmp_path: Path, num_items: int) -> None:
    """Random images, of which each takes 16 tokens."""
    words = ["--backend", "openai-chat", "--dataset-name", "random-mm", "--num-prompts", "4"]
    words += ["--input-len", "10", "--output-len", "3", "--ignore-eos", "--save-result"]
    words += ["--extra-body", '{"allowed_token_ids": [1, 2, 3]}']
    words += ["--random-mm-base-items-per-request", str(num_items)]
    words += ["--random-mm-bucket-config", "{(20, 30, 1): 1.0, (40, 9, 1): 2}"]
    place = ["--result-dir", str(tmp_path), "--result-filename", "result.json"]
    command = [sys.executable, "-m", "pegboard", "bench", "serve", "--port", str(server.port)]
    ended = subprocess.run([*command, *words, *place], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (4, 12)
    assert result["total_input_tokens"] >= 4 * 16 * num_items


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--random-mm-bucket-config", "{1: 2}"], "expected a mapping such as"),
        (["--random-mm-bucket-config", "{(8, 8, 16): 1}"], "only images are made"),
        (["--random-mm-num-mm-items-range-ratio", "2"], "must be in [0, 1]"),
        (["--backend", "openai"], "images need --backend openai-chat"),
        (["--backend", "openai-audio"], "openai-audio takes --dataset-name custom"),
    ],
)
def test_bench_refuses(server: Server, words: list[str], told: str) -> None:
    command = [sys.executable, "-m", "pegboard", "bench", "serve", "--port", str(server.port)]
    more = ["--dataset-name", "random-mm", "--num-prompts", "1", "--input-len", "3"]
    given = [*command, "--backend", "openai-chat", *more, *words]
    ended = subprocess.run(given, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0 and told in ended.stderr


@pytest.mark.slow
def test_a_batch_file(llava: MediaReference, tmp_path: Path) -> None:
    """An image in a file of requests is answered as over HTTP, and a broken one by itself is
    refused."""
    broken = part("data:image/png;base64,AAAA")
    bodies = [messages(part(url_of(IMAGES[0])), "w4"), messages(broken), messages("w4")]
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": body, "max_tokens": 5, "temperature": 0, "ignore_eos": True},
        }
        for number, body in enumerate(bodies)
    ]
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    sizes = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
    ended = cli("run-batch", str(llava.directory), "-i", str(source), "-o", str(target), *sizes)
    assert ended.returncode == 0, ended.stderr
    first, second, third = (json.loads(line) for line in target.read_text().splitlines())
    content = first["response"]["body"]["choices"][0]["message"]["content"]
    assert content.strip() == expected(llava, IMAGES[0], 4)
    assert (
        second["response"]["status_code"] == 400
        and "content[0]" in second["error"]["error"]["message"]
    )
    assert third["response"]["status_code"] == 200

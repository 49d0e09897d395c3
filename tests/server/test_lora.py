"""LoRA adapters of a real server: the official openai client names them, operators load and unload
them, resolvers find them, and bad ones are clear errors that leave nothing behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file
from server_process import HTTP, MODEL, Server

PROMPT = "The three primary colors are"
QUESTION: Any = [{"role": "user", "content": "Name a color."}]
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
HIDDEN = 576
KV = 192
NUM_LAYERS = 30
STRENGTH = 0.1
"""Of a random adapter: strong enough for another text, and weak enough for a sentence."""
SAME = 0.15
OTHER = 0.25
"""Scores of one adapter differ by less than the first, those of two adapters by more than the
second (see `distance`)."""
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": BASE,
}


def make_adapter(
    folder: Path,
    seed: int = 0,
    *,
    config: Any = None,
    rank: int = 4,
    width: int = HIDDEN,
    **more: Any,
) -> Path:
    """Write a random adapter that fits the model, unless a size says otherwise. more: files with
    their bytes."""
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for module, rows in (("q_proj", HIDDEN), ("v_proj", KV)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = (
                torch.randn(rank, width, generator=chance) / width**0.5
            )
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=chance) * STRENGTH
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": rank, **(config or {})}))
    save_file(tensors, folder / "adapter_model.safetensors")
    for name, content in more.items():
        (folder / f"adapter_model.{name}").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: `a` and `b` are static, those in `found` are for the resolver, and a `secret` one
    is next to that folder."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(
        ("a", "b", "found/poet", "found/team/deep", "found/shared", "secret", "extra"), 1
    ):
        make_adapter(root / name, seed)
    make_adapter(root / "found/other", config={"base_model_name_or_path": "org/other"})
    make_adapter(root / "found/huge", rank=64)
    (root / "found/leak").symlink_to(root / "secret")
    return root


@pytest.fixture(scope="module")
def server(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory, probe: Path, adapters: Path
) -> Iterator[Server]:
    module = json.dumps({"name": "b", "path": str(adapters / "b"), "base_model_name": MODEL})
    flags = [
        "--enable-lora",
        "--max-loras",
        "2",
        "--max-cpu-loras",
        "4",
        "--max-lora-rank",
        "8",
        "--allow-runtime-lora-updating",
        "--lora-modules",
        f"a={adapters / 'a'}",
        module,
        "--lora_resolver.filesystem.directory",
        str(adapters / "found"),
        "--lora-base-models",
        BASE,
    ]
    with Server(smollm2_gguf, tmp_path_factory.mktemp("server"), *flags, probe=probe) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


@pytest.fixture(autouse=True)
def left_idle(server: Server) -> Iterator[None]:
    yield
    server.wait_until_idle()


def complete(client: openai.OpenAI, model: str, num_tokens: int = 12) -> str:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=num_tokens, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].text


def load(server: Server, name: str, path: Path | str, **more: Any) -> httpx.Response:
    return HTTP.post(
        f"{server.url}/v1/load_lora_adapter",
        json={"lora_name": name, "lora_path": str(path), **more},
    )


def unload(server: Server, name: str) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name})


def test_models_are_listed_with_parent_and_root(client: openai.OpenAI, adapters: Path) -> None:
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert list(listed)[:3] == [MODEL, "a", "b"]
    assert listed[MODEL]["parent"] is None
    for name in ("a", "b"):
        assert listed[name]["parent"] == MODEL and listed[name]["root"] == str(adapters / name)
    assert client.models.retrieve("a").id == "a"


def test_every_route_takes_an_adapter_as_its_model(client: openai.OpenAI, server: Server) -> None:
    """Each route gives another text with an adapter than without, and names the adapter in its
    answer."""
    texts = {complete(client, name) for name in (MODEL, "a", "b")}
    assert len(texts) == 3

    def chat(model: str) -> tuple[str, str | None]:
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=8, temperature=0
        )
        return answer.model, answer.choices[0].message.content

    def respond(model: str) -> tuple[str, str]:
        answer = client.responses.create(
            model=model, input="Name a color.", max_output_tokens=16, temperature=0
        )
        return answer.model, answer.output_text

    def message(model: str) -> tuple[str, str]:
        body = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
        answer = HTTP.post(f"{server.url}/v1/messages", json=body).raise_for_status().json()
        return answer["model"], answer["content"][0]["text"]

    for ask in (chat, respond, message):
        answers = {name: ask(name) for name in (MODEL, "a")}
        assert [model for model, _ in answers.values()] == [MODEL, "a"]
        assert answers[MODEL][1] != answers["a"][1]
    with client.chat.completions.create(
        model="b", messages=QUESTION, max_tokens=8, temperature=0, stream=True
    ) as stream:
        chunks = list(stream)
    assert {chunk.model for chunk in chunks} == {"b"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    counted = HTTP.post(f"{server.url}/tokenize", json={"model": "a", "prompt": PROMPT})
    assert counted.status_code == 200 and counted.json()["count"] > 3


def scores(client: openai.OpenAI, model: str) -> dict[str, float]:
    """Return the logprobs of the first token's 20 best candidates."""
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=1, temperature=0, logprobs=20
    )
    assert (
        answer.choices[0].logprobs is not None
        and answer.choices[0].logprobs.top_logprobs is not None
    )
    return dict(answer.choices[0].logprobs.top_logprobs[0])


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Return the mean difference of the logprobs that both have; without one, a large number."""
    both = one.keys() & other.keys()
    return sum(abs(one[token] - other[token]) for token in both) / len(both) if both else 10.0


def test_adapters_in_one_batch_are_as_alone(client: openai.OpenAI) -> None:
    """Rows of a batch are rounded otherwise than a single row, so texts can differ. The scores
    hardly do."""
    names = [MODEL, "a", "b"]
    alone = {name: scores(client, name) for name in names}
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda name: (name, scores(client, name)), names * 4))
    own = max(distance(found, alone[name]) for name, found in answers)
    others = min(
        distance(found, alone[name]) for other, found in answers for name in names if name != other
    )
    assert own < SAME < OTHER < others, (own, others)


def test_load_replace_and_unload(client: openai.OpenAI, server: Server, adapters: Path) -> None:
    """vLLM's bodies, statuses and messages."""
    done = load(server, "extra", adapters / "extra")
    assert (done.status_code, done.text) == (
        200,
        "Success: LoRA adapter 'extra' added successfully.",
    )
    found = [scores(client, "extra")]
    again = load(server, "extra", adapters / "extra")
    assert again.status_code == 400 and again.json()["error"]["type"] == "InvalidUserInput"
    assert again.json()["error"]["message"].startswith(
        "The lora adapter 'extra' has already been loaded."
    )
    make_adapter(adapters / "changing", 20)
    assert load(server, "extra", adapters / "changing", load_inplace=True).status_code == 200
    found.append(scores(client, "extra"))
    make_adapter(adapters / "changing", 21)
    assert load(server, "extra", adapters / "changing", load_inplace=True).status_code == 200
    found.append(scores(client, "extra"))
    assert min(distance(one, other) for one, other in combinations(found, 2)) > OTHER, (
        "nothing comes from the prefix cache"
    )
    gone = unload(server, "extra")
    assert (gone.status_code, gone.text) == (
        200,
        "Success: LoRA adapter 'extra' removed successfully.",
    )
    with pytest.raises(openai.NotFoundError, match="The model `extra` does not exist"):
        complete(client, "extra")
    missing = unload(server, "extra")
    assert (
        missing.status_code == 404
        and missing.json()["error"]["message"] == "The lora adapter 'extra' cannot be found."
    )


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("load", {}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ("load", {"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path'"),
        (
            "load",
            {"lora_name": "x", "lora_path": "/no/such/folder"},
            404,
            "No adapter found for /no/such/folder",
        ),
        ("load", {"lora_name": "x", "lora_path": "/dev/zero"}, 404, "No adapter found"),
        ("load", {"lora_name": "x", "lora_path": "a\0b"}, 404, "No adapter found"),
        ("load", {"lora_name": "x", "lora_path": 3}, 400, "lora_path"),
        ("load", {"lora_name": "x", "lora_path": "/", "is_3d": True}, 400, "is_3d"),
        ("load", {"lora_name": "x", "lora_path": "x" * 100_000}, 404, "No adapter found"),
        ("unload", {}, 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
        ("unload", {"lora_name": "nobody"}, 404, "The lora adapter 'nobody' cannot be found."),
        ("unload", {"lora_name": MODEL}, 404, f"The lora adapter '{MODEL}' cannot be found."),
        ("unload", {"lora_name": "a", "lora_int_id": 1}, 404, "cannot be found"),
        ("unload", [], 400, ""),
    ],
)
def test_bodies_that_ask_for_nothing_there(
    server: Server, route: str, body: Any, status: int, words: str
) -> None:
    answer = HTTP.post(f"{server.url}/v1/{route}_lora_adapter", json=body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"] and answer.json()["error"]["code"] == status


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 16}, "max_lora_rank=8"),
    "width": ({"width": 64}, "do not fit the model"),
    "dora": ({"config": {"use_dora": True}}, "DoRA is not supported"),
    "rank says": ({"config": {"r": 3}}, "have rank 4, and adapter_config.json says 3"),
    "saved": ({"config": {"modules_to_save": ["lm_head"]}}, "modules_to_save"),
    "bias": ({"config": {"bias": "all"}}, "change biases"),
    "alpha": ({"config": {"lora_alpha": "8"}}, "lora_alpha"),
    "header": (
        {"safetensors": (2 << 30).to_bytes(8, "little") + b"{"},
        "instead of the length of a header",
    ),
    "short": ({"safetensors": b"x"}, "not a safetensors file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_adapter_is_a_clear_400(
    client: openai.OpenAI, server: Server, tmp_path: Path, case: str
) -> None:
    made, words = HOSTILE[case]
    answer = load(server, "hostile", make_adapter(tmp_path / "hostile", **made))
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert "hostile" not in [model.id for model in client.models.list()]
    assert complete(client, "a", 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(
    server: Server, tmp_path: Path, value: float
) -> None:
    folder = make_adapter(tmp_path / "bad")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    a = torch.randn(4, HIDDEN)
    b = torch.randn(HIDDEN, 4)
    b[3, 2] = value
    save_file(
        {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b},
        folder / "adapter_model.safetensors",
    )
    answer = load(server, "bad", folder)
    assert answer.status_code == 400 and "not finite" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "x y", "a\0b", ".x", "x" * 201, MODEL])
def test_names_that_cannot_be_an_adapters(server: Server, adapters: Path, name: str) -> None:
    answer = load(server, name, adapters / "extra")
    assert answer.status_code == 400, answer.text
    assert (
        "cannot be the name of an adapter" in answer.text or "name of the base model" in answer.text
    )


def test_resolvers_find_adapters_once(client: openai.OpenAI, server: Server) -> None:
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: scores(client, "shared"), range(6)))
    assert (
        max(distance(found[0], one) for one in found)
        < SAME
        < OTHER
        < distance(found[0], scores(client, MODEL))
    )
    assert server.log.read_text().count("LoRA adapter 'shared' was found by") == 1
    assert distance(found[0], scores(client, "team/deep")) > OTHER
    assert {"shared", "team/deep"} <= {model.id for model in client.models.list()}
    assert unload(server, "team/deep").status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "nobody",
        "../secret",
        "leak",
        "poet/../../secret",
        "/etc",
        "..",
        "%2e%2e/secret",
        "poet/adapter_config.json",
        "x" * 900,
    ],
)
def test_nothing_outside_the_folder_is_an_adapter(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as refusal:
        complete(client, name)
    assert refusal.value.param == "model"


@pytest.mark.parametrize(
    ("name", "words"),
    [("other", "made for the base model 'org/other'"), ("huge", "max_lora_rank=8")],
)
def test_a_found_adapter_that_does_not_fit_is_a_400(
    client: openai.OpenAI, adapters: Path, name: str, words: str
) -> None:
    with pytest.raises(
        openai.BadRequestError, match=f"`{name}` was found but could not be loaded: .*{words}"
    ) as refusal:
        complete(client, name)
    assert str(adapters) not in str(refusal.value)


def test_many_loads_and_unloads_leave_nothing(
    client: openai.OpenAI, server: Server, adapters: Path
) -> None:
    """More adapters than slots and memory, used while they are loaded and unloaded."""
    alone = scores(client, "a")
    expected = []
    for folder in ("extra", "secret"):
        assert load(server, folder, adapters / folder).status_code == 200
        expected.append(scores(client, folder))
        assert unload(server, folder).status_code == 200
    assert distance(*expected) > OTHER

    def cycle(number: int) -> float:
        name = f"cycle{number}"
        assert load(server, name, adapters / ("extra", "secret")[number % 2]).status_code == 200
        found = scores(client, name)
        assert unload(server, name).status_code == 200
        return distance(found, expected[number % 2])

    def num_threads() -> int:
        return len(list(Path(f"/proc/{server.engine_pid()}/task").iterdir()))

    cycle(0)
    before = num_threads()
    with ThreadPoolExecutor(2) as threads:
        assert max(threads.map(cycle, range(1, 13))) < SAME
    assert num_threads() <= before + 2
    assert distance(scores(client, "a"), alone) < SAME
    listed = {model.id for model in client.models.list()}
    assert not any(name.startswith("cycle") for name in listed)


# --- other features of requests with an adapter ---------------------------------------------------


def test_structured_output_and_stop_strings(client: openai.OpenAI) -> None:
    """Both hold for an adapter as for the base model, and the adapter still decides what is
    allowed."""
    more = {"structured_outputs": {"regex": "[a-z]{4,9}( [a-z]{2,9}){3}"}}
    found = {}
    for name in (MODEL, "a", "b"):
        answer = client.completions.create(
            model=name, prompt=PROMPT, max_tokens=40, temperature=0, extra_body=more
        )
        found[name] = answer.choices[0].text
        assert re.fullmatch(more["structured_outputs"]["regex"], found[name]), found
    assert len(set(found.values())) > 1
    whole = complete(client, "a", 16)
    word = whole[len(whole) // 2 :][:3]
    answer = client.completions.create(
        model="a", prompt=PROMPT, max_tokens=16, temperature=0, stop=[word]
    )
    assert (
        answer.choices[0].finish_reason == "stop"
        and answer.choices[0].text == whole.partition(word)[0]
    )

"""LoRA adapters of a server with several API processes: what one of them loads and unloads holds in
all. The model is a tiny random one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from server_process import HTTP, MODEL, Server, wait_until
from transformers import AutoConfig, AutoModelForCausalLM

from pegboard_testing.fake_distributions import FakeDistributions

HIDDEN = 32
NUM_PROCESSES = 2
WHO = '''
import os

from starlette.responses import JSONResponse
from starlette.routing import Route

from pegboard.interfaces.api import ApiSpec

SPEC = ApiSpec(api="1.0", implementation="acme_who:Who")


class Who:
    """GET /who: the process that answers."""

    def __init__(self, options, setup):
        pass

    def routes(self):
        return [Route("/who", self.answer)]

    def error_body(self, status, message, parameter):
        return {"error": message}

    async def answer(self, request):
        return JSONResponse(os.getpid())
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=131,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def make_adapter(folder: Path, seed: int, width: int = HIDDEN) -> Path:
    chance = torch.Generator().manual_seed(seed)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {}
    for layer in range(2):
        tensors[name.format(layer, "A")] = torch.randn(4, width, generator=chance)
        tensors[name.format(layer, "B")] = torch.randn(HIDDEN, 4, generator=chance)
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("module", "poet", "painter", "found/shared")):
        make_adapter(root / name, seed)
    make_adapter(root / "wide", 9, width=2 * HIDDEN)
    return root


@pytest.fixture(scope="module")
def server(
    model: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    plugins = tmp_path_factory.mktemp("plugins")
    FakeDistributions(plugins).add(
        "acme-probe", {"api": {"probe": "acme_who:SPEC"}}, {"acme_who": WHO}, requires=["pegboard"]
    )
    flags = [
        "--api-server-count",
        str(NUM_PROCESSES),
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
        "--max-loras",
        "2",
        "--max-cpu-loras",
        "8",
        "--allow-runtime-lora-updating",
        "--lora-modules",
        f"module={adapters / 'module'}",
        "--lora_resolver.filesystem.directory",
        str(adapters / "found"),
    ]
    with Server(model, tmp_path_factory.mktemp("server"), *flags, probe=plugins) as running:
        yield running.wait_until_ready()
    running.check_nothing_left()


@pytest.fixture(scope="module")
def processes(server: Server) -> Iterator[list[httpx.Client]]:
    """One client for each API process, with a connection that stays open."""
    by_process: dict[int, httpx.Client] = {}
    with ExitStack() as clients:

        def is_complete() -> bool:
            client = clients.enter_context(httpx.Client(base_url=server.url, timeout=60))
            by_process.setdefault(client.get("/who").json(), client)
            return len(by_process) == NUM_PROCESSES

        wait_until(is_complete, "each process has a client")
        yield list(by_process.values())


def tokens(client: httpx.Client, model: str) -> list[int]:
    body: dict[str, Any] = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8}
    more = {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body | more)
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


def listed(client: httpx.Client) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json()["data"]]


def load(client: httpx.Client, name: str, path: Path, **more: Any) -> httpx.Response:
    return client.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more}
    )


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


@pytest.mark.slow
def test_what_one_process_loads_all_serve(processes: list[httpx.Client], adapters: Path) -> None:
    one, other = processes
    assert listed(one) == listed(other) == [MODEL, "module"]
    base = tokens(one, MODEL)
    for first, second in ((one, other), (other, one)):
        assert load(first, "poet", adapters / "poet").status_code == 200
        assert listed(second) == listed(first) == [MODEL, "module", "poet"]
        poet = tokens(second, "poet")
        assert poet == tokens(first, "poet") != base
        assert load(second, "poet", adapters / "painter").status_code == 400
        assert load(second, "poet", adapters / "painter", load_inplace=True).status_code == 200
        assert tokens(first, "poet") == tokens(second, "poet") not in (poet, base)
        assert unload(second, "poet").status_code == 200
        assert unload(first, "poet").status_code == 404
        for client in processes:
            assert listed(client) == [MODEL, "module"]
            body = {"model": "poet", "prompt": [5], "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 404


@pytest.mark.slow
def test_an_adapter_that_does_not_fit_is_the_error_of_who_loads_it(
    processes: list[httpx.Client], adapters: Path
) -> None:
    for client in processes:
        answer = load(client, "wide", adapters / "wide")
        assert answer.status_code == 400
        assert "do not fit the model" in answer.json()["error"]["message"]
        assert load(client, "none", adapters / "none").status_code == 404
    assert [listed(client) for client in processes] == [[MODEL, "module"]] * 2


@pytest.mark.slow
def test_what_one_process_finds_all_list(processes: list[httpx.Client]) -> None:
    one, other = processes
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda n: tokens(processes[n % 2], "shared"), range(6)))
    assert all(each == answers[0] for each in answers)
    assert "shared" in listed(one)
    assert listed(one) == listed(other)
    assert unload(other, "shared").status_code == 200
    assert "shared" not in listed(one)


@pytest.mark.slow
def test_loads_through_all_processes_at_once(
    server: Server, processes: list[httpx.Client], adapters: Path
) -> None:
    """No request after a load misses the adapter, and all processes end with the same list."""

    def cycle(number: int) -> None:
        name = f"n{number % 5}"
        body = {
            "lora_name": name,
            "lora_path": str(adapters / ("poet", "painter")[number % 2]),
            "load_inplace": True,
        }
        HTTP.post(f"{server.url}/v1/load_lora_adapter", json=body).raise_for_status()
        models = HTTP.get(f"{server.url}/v1/models").json()["data"]
        assert name in [model["id"] for model in models]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(cycle, range(40)))
    names = [listed(client) for client in processes]
    assert names[0] == names[1]
    for name in names[0][2:]:
        assert tokens(processes[0], name) == tokens(processes[1], name)
        assert unload(processes[0], name).status_code == 200
    assert [listed(client) for client in processes] == [[MODEL, "module"]] * 2

"""A server with the routes for developers: a profile becomes a trace file, and a trainer's weights
come over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pegboard_weight_transfer_shared_memory.trainer import shared
from server_process import HTTP, MODEL, Server
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PROMPT = [5, 6, 7]


def llama(seed: int) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.5,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("developer")


@pytest.fixture(scope="module")
def developed(folder: Path) -> Iterator[Server]:
    llama(1).save_pretrained(folder / "model")
    flags = ["--skip-tokenizer-init", "--max-model-len", "128"]
    flags += ["--weight-transfer-config", '{"backend": "shared_memory"}']
    flags += ["--api.admin.profile_directory", str(folder / "profiles")]
    with Server(folder / "model", folder, *flags, VLLM_SERVER_DEV_MODE="1") as server:
        yield server.wait_until_ready()


def tokens(server: Server) -> list[int]:
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = HTTP.post(f"{server.url}/v1/completions", json=body).raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def expected(model: PreTrainedModel) -> list[int]:
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)  # type: ignore[operator]
    return list(output[0, len(PROMPT) :].tolist())


def test_a_profile_is_a_trace(developed: Server, folder: Path) -> None:
    HTTP.post(f"{developed.url}/start_profile").raise_for_status()
    tokens(developed)
    HTTP.post(f"{developed.url}/stop_profile").raise_for_status()
    (file,) = (folder / "profiles").rglob("trace.json")
    assert json.loads(file.read_text())["traceEvents"]


def test_a_trainer_sends_weights(developed: Server) -> None:
    """What does not fit is refused, and the server answers as before."""
    before, after = llama(1), llama(2)
    assert tokens(developed) == expected(before)
    url = f"{developed.url}/update_weights"
    weights = dict(after.state_dict())
    with shared({**weights, "model.norm.weight": torch.ones(7)}) as info:
        answer = HTTP.post(url, json={"update_info": info})
        assert answer.status_code == 400 and "model.norm.weight" in answer.text
        assert tokens(developed) == expected(before)
    with shared(weights) as info:
        HTTP.post(url, json={"update_info": info}).raise_for_status()
    assert tokens(developed) == expected(after) != expected(before)

"""Servers whose models are divided among processes give the answers of one rank: greedy tokens and
logprobs, with prompts that share a beginning, chunked prompts, and preemption.

    python -m pytest tests/parity/test_rank_servers.py

The results are in docs/scaling.md.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stored_layouts import quantize
from test_latent_parity import EXPERTS, LATENT
from test_state_parity import QWEN
from tiny_models import VOCAB_SIZE, Reference, make_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_process import HTTP, MODEL, Server

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

LONG = {"max_position_embeddings": 1024}
GROUPED = {"hidden_size": 128, "intermediate_size": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mixture": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "latent attention": ("deepseek_v2", {**LATENT, **EXPERTS, "q_lora_rank": None}),
    "hybrid": ("qwen3_next", QWEN),
    "GPTQ": ("llama", GROUPED),
    "GGUF": ("", {}),
    "llama, int8 KV cache": ("llama", {}),
    "llama, LoRA": ("llama", {}),
}
MORE: dict[str, tuple[str, ...]] = {"llama, int8 KV cache": ("--kv-cache-dtype", "int8")}
ROUGH = {"GPTQ": 0.02, "GGUF": 0.15}
"""Activations in 8 bits are rounded: the largest mean difference of a request's logprobs. Sampled
tokens may then differ."""
EXACT = 1e-4
STORED = {"llama, int8 KV cache": 1e-2}
"""Keys and values that are rounded to 8 bits: a rounding error may decide which value is stored."""
WITH_EXPERTS = ("mixture", "latent attention", "hybrid")
SPLITS: dict[str, tuple[str, ...]] = {
    "TP 2": ("-tp", "2"),
    "TP 4": ("-tp", "4"),
    "PP 2": ("-pp", "2"),
    "TP 2 × PP 2": ("-tp", "2", "-pp", "2"),
    "DP 2": ("-dp", "2"),
    "EP 2": ("-tp", "2", "-ep"),
    "EP 2, EPLB": ("-tp", "2", "-ep", "--enable-eplb", "--eplb-config.step_interval", "5"),
    "DP 2 × EP 2": ("-dp", "2", "-ep"),
    "DCP 2": ("-tp", "4", "-dcp", "2"),
    "PCP 2": ("-pcp", "2"),
}
IMPOSSIBLE = {
    ("hybrid", "PCP 2"): "states",
    ("llama, LoRA", "PCP 2"): "adapters",
    ("GGUF", "TP 4"): "3 KV heads among 4 ranks are not equal shares",
    ("GGUF", "DCP 2"): "ranks must have equally many query heads",
}
"""What is refused, and why."""


def cases() -> list[tuple[str, str]]:
    return [
        (model, split)
        for model in MODELS
        for split in SPLITS
        if (model in WITH_EXPERTS or "EP" not in split) and (model, split) not in IMPOSSIBLE
    ]


def prompts() -> list[list[int]]:
    """Half of them have the same beginning."""
    chance = torch.Generator().manual_seed(3)
    lengths = (1, 9, 40, 150, 30, 70, 110, 21)
    parts = [torch.randint(3, VOCAB_SIZE, (n,), generator=chance).tolist() for n in lengths]
    return [parts[3] + part if index % 2 else part for index, part in enumerate(parts)]


def answers(server: Server, name: str) -> list[dict[str, Any]]:
    """What the server answers to all prompts at the same time, at first with the logprobs of
    prompts, which are computed anew for every request."""

    def answer(prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {
            "model": name,
            "prompt": prompt,
            "max_tokens": 60,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            **more,
        }
        got = HTTP.post(f"{server.url}/v1/completions", json=body)
        assert got.status_code == 200, got.text
        return dict(got.json()["choices"][0])

    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(partial(answer, prompt_logprobs=0), prompts()))
        return [*first, *pool.map(answer, prompts())]


def logprobs(choice: dict[str, Any]) -> torch.Tensor:
    """Those of the prompt, and of the sampled tokens."""
    positions = (choice["prompt_logprobs"] or [])[1:]
    prompt = [next(iter(each.values()))["logprob"] for each in positions]
    return torch.tensor([*prompt, *choice["logprobs"]["token_logprobs"]])


@pytest.fixture(scope="module")
def model(
    tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path
) -> Callable[[str], tuple[Path, tuple[str, ...]]]:
    """model(name) returns the checkpoint, and more flags."""

    @functools.cache
    def write(name: str) -> tuple[Path, tuple[str, ...]]:
        folder = tmp_path_factory.mktemp("model")
        kind, values = MODELS[name]
        if not kind:
            return smollm2_gguf, ()
        reference = Reference(folder, make_model(kind, **{**LONG, **values}))
        reference.model.save_pretrained(folder)
        words = {f"word{number}": number for number in range(VOCAB_SIZE)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="word2"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        flags = ("--dtype", "float32", *MORE.get(name, ()))
        if name == "GPTQ":
            quantize(reference, "gptq")
        if "LoRA" in name:
            adapter = write_adapter(tmp_path_factory.mktemp("adapter"), reference.model)
            flags = (*flags, "--max-loras", "1", "--lora-modules", f"adapter={adapter}")
        return folder, flags

    return write


def write_adapter(folder: Path, model: Any) -> Path:
    chance = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(3, columns, generator=chance) * 0.3
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, 3, generator=chance) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def run(
    model: Callable[[str], tuple[Path, tuple[str, ...]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., list[dict[str, Any]]]:
    """run(name, *flags) returns the answers of a server, which ends and leaves nothing."""

    @functools.cache
    def answers_of(name: str, *split: str) -> list[dict[str, Any]]:
        checkpoint, flags = model(name)
        small = ("--num-gpu-blocks-override", "32", "--max-num-batched-tokens", "64")
        small = (*small, "--max-model-len", "400")
        folder = tmp_path_factory.mktemp("server")
        with Server(checkpoint, folder, *flags, *small, *split, "--num-threads", "1") as server:
            server.wait_until_ready()
            served = "adapter" if "LoRA" in name else MODEL
            got = answers(server, served)
            metrics = HTTP.get(f"{server.url}/metrics").text
            if not split:
                assert total(metrics, "num_preemptions_total") > 0
                # states are kept at other places than where these prompts part
                assert name == "hybrid" or total(metrics, "prefix_cache_hits_total") > 0
            assert server.stop() == 0
        server.check_nothing_left()
        return got

    return answers_of


def total(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(f"vllm:{name}{{")]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.parametrize(("name", "split"), cases())
def test_ranks_answer_as_one(
    run: Callable[..., list[dict[str, Any]]], name: str, split: str
) -> None:
    for one, many in zip(run(name), run(name, *SPLITS[split]), strict=True):
        ids = [choice["token_ids"] for choice in (one, many)]
        if name not in ROUGH:
            assert ids[0] == ids[1]
        equal = [*map(int.__eq__, *ids), False]
        count = len(logprobs(one)) - len(ids[0]) + equal.index(False)
        difference = (logprobs(one)[:count] - logprobs(many)[:count]).abs()
        if name in ROUGH:
            assert not count or difference.mean() < ROUGH[name]
        else:
            assert difference.max() < STORED.get(name, EXACT)

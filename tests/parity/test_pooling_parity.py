"""Vectors of decoders, compared with the hidden states that transformers computes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI
from pegboard_api_pooling.api import PoolingApi
from pegboard_api_pooling.plugin import POOLING
from tiny_models import DIVIDED

from pegboard import LLM, AsyncLLM, PoolingParams, SamplingParams
from pegboard import installed as installed_plugins
from pegboard.errors import ConfigError, ModelError, PegboardError, RequestError
from pegboard.interfaces.api import ApiSetup
from pegboard.plugins import discovery
from pegboard_testing.fake_distributions import FakeDistributions
from pegboard_testing.served_app import make_app

ARCHITECTURES = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma3, windows": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 20},
    ),
    "mamba": ("mamba", {"state_size": 4, "intermediate_size": None}),
}
LENGTHS = (1, 6, 17, 40, 64)
LIMITS = {"runner": "pooling", "max_model_len": 64}


def expected(
    reference: Any, prompt: list[int], size: int | None = None, *, normalized: bool = True
) -> torch.Tensor:
    with torch.no_grad():
        hidden = reference.model.base_model(torch.tensor([prompt])).last_hidden_state
    vector = hidden[0, -1, :size]
    return vector / vector.norm() if normalized else vector


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 131, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors_equal_the_last_hidden_state(
    name: str, write: Callable[..., Any], open_llm: Callable[..., LLM]
) -> None:
    """Prompts of mixed lengths, in chunks, up to max_model_len; a second time from the prefix
    cache."""
    model_type, values = ARCHITECTURES[name]
    reference = write(model_type, **values)
    prompts = prompts_of()
    params = [PoolingParams(use_activation=place % 2 == 0) for place in range(len(prompts))]
    with open_llm(reference.directory, **LIMITS, mamba_block_size=8) as llm:
        for _ in range(2):
            outputs = llm.embed(prompts, pooling_params=params, use_tqdm=False)
            for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                found = torch.tensor(output.outputs.embedding)
                true = expected(reference, prompt, normalized=place % 2 == 0)
                assert output.prompt_token_ids == prompt and output.finished
                assert (found - true).abs().max() < 1e-4
                assert torch.cosine_similarity(found, true, dim=0) > 0.9999
        assert outputs[-1].num_cached_tokens


def test_preempted_prompts_and_a_shared_prefix(
    write: Callable[..., Any], open_llm: Callable[..., LLM]
) -> None:
    """There are blocks for one long prompt and a half, so prompts lose their blocks and are
    computed again."""
    reference = write("llama")
    prompts = [
        [*range(3, 3 + shared), *rest]
        for shared, rest in zip((30, 40, 0, 30), prompts_of((20, 9, 50, 33)), strict=True)
    ]
    with open_llm(
        reference.directory, **LIMITS, num_gpu_blocks_override=24, max_num_partial_prefills=3
    ) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        assert llm.llm_engine.engine.stats()["num_preemptions_total"] or DIVIDED
    for prompt, output in zip(prompts, outputs, strict=True):
        assert (
            torch.tensor(output.outputs.embedding) - expected(reference, prompt)
        ).abs().max() < 1e-4


def test_what_a_request_may_ask_for(
    write: Callable[..., Any], open_llm: Callable[..., LLM]
) -> None:
    reference = write("llama")
    prompt = prompts_of((70,))[0]
    config = {"matryoshka_dimensions": [8, 16]}
    with open_llm(reference.directory, **LIMITS, hf_overrides=config) as llm:
        for params, true in (
            (PoolingParams(truncate_prompt_tokens=-1), expected(reference, prompt[:64])),
            (
                PoolingParams(truncate_prompt_tokens=5, dimensions=8),
                expected(reference, prompt[:5], 8),
            ),
        ):
            (output,) = llm.embed(prompt, pooling_params=params, use_tqdm=False)
            assert output.outputs.hidden_size == len(true)
            assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-4
        for params, message in (
            (PoolingParams(), "the prompt has 70 tokens, but max_model_len is 64: shorten"),
            (PoolingParams(truncate_prompt_tokens=65), "over the model's max_model_len"),
            (PoolingParams(truncate_prompt_tokens=5, dimensions=9), "expected 8, 16"),
            (SamplingParams(), "pooling_params must be PoolingParams, got SamplingParams"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.embed(prompt, pooling_params=params, use_tqdm=False)
        with pytest.raises(
            RequestError, match="does not generate text; start it with runner 'generate'"
        ):
            llm.generate([prompt[:5]], use_tqdm=False)
    with (
        open_llm(reference.directory) as llm,
        pytest.raises(RequestError, match="start it with runner 'pooling'"),
    ):
        llm.embed([prompt[:5]], use_tqdm=False)
    for field, value in (("dimensions", 0), ("truncate_prompt_tokens", -2), ("use_activation", 1)):
        with pytest.raises(RequestError, match=f"{field} must be"):
            PoolingParams(**{field: value})


def declare(directory: Path, mode: str, *steps: str) -> None:
    """Write the files of sentence-transformers: these steps, and how the step Pooling pools."""
    modules = [{"idx": 0, "type": "sentence_transformers.models.Transformer", "path": ""}]
    modules += [
        {"type": f"sentence_transformers.models.{step}", "path": f"1_{step}"} for step in steps
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {
        f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")
    }
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **modes})
    )


def test_steps_that_sentence_transformers_declares(
    write: Callable[..., Any], open_llm: Callable[..., LLM]
) -> None:
    reference = write("llama")
    prompt = prompts_of((12,))[0]
    for steps, normalized in ((("Pooling",), False), (("Pooling", "Normalize"), True)):
        declare(reference.directory, "lasttoken", *steps)
        with open_llm(reference.directory, **LIMITS) as llm:
            (output,) = llm.embed(prompt, use_tqdm=False)
        true = expected(reference, prompt, normalized=normalized)
        assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-4
    for mode, steps, message in (
        (
            "weights",
            ["Pooling"],
            "the model pools by nothing; supported: cls_token, max_tokens, mean_tokens",
        ),
        ("lasttoken", ["Pooling", "LSTM"], "the step 'LSTM' is not supported"),
    ):
        declare(reference.directory, mode, *steps)
        with pytest.raises(ModelError, match=message):
            open_llm(reference.directory, **LIMITS)
    with pytest.raises(ConfigError, match="remove spec_method"):
        open_llm(reference.directory, **LIMITS, spec_method="ngram", spec_tokens=2)


def test_over_http(write: Callable[..., Any]) -> None:
    """The engine runs in its own process. Text is refused."""
    reference = write("llama")
    prompts = prompts_of((3, 12))
    settings = {
        **LIMITS,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 4 << 20,
    }

    def apis(setup: ApiSetup) -> Any:
        return [
            ("pooling", PoolingApi(None, setup), POOLING),
            ("openai", OpenAIApi(None, setup), OPENAI),
        ]

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        async with AsyncLLM(str(reference.directory), **settings) as llm:
            transport = httpx.ASGITransport(make_app(apis, llm))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test", timeout=60
            ) as http:
                text = await http.post("/v1/completions", json={"prompt": prompts[0]})
                return await http.post("/v1/embeddings", json={"input": prompts}), text

    answer, text = asyncio.run(ask())
    assert text.status_code == 400 and "makes vectors" in text.json()["error"]["message"]
    assert answer.status_code == 200, answer.text
    for prompt, each in zip(prompts, answer.json()["data"], strict=True):
        assert (torch.tensor(each["embedding"]) - expected(reference, prompt)).abs().max() < 1e-4


POOLER = """
from pegboard.data.pooling_params import Pooling
from pegboard.interfaces.pooler import PoolerSpec

SPEC = PoolerSpec(api="3.0", implementation="acme_pooler:Pooler", plan="acme_pooler:plan")
OLD = PoolerSpec(api="2.0", implementation="acme_pooler:OldPooler", plan="acme_pooler:plan")


def plan(facts):
    if facts.config.get("fault") == "plan raises":
        raise ZeroDivisionError("no luck")
    return 3 if facts.config.get("fault") == "plan" else Pooling(method=dict(facts.config))


class Pooler:
    def __init__(self, options, setup):
        self.fault = setup.pooling.method.get("fault")

    def pool(self, hidden, step):
        if self.fault == "raise":
            raise ZeroDivisionError("no luck")
        if self.fault == "call":
            return []
        vectors = [row.numpy() for row in hidden[step.last]]
        return lambda: "nonsense" if self.fault == "type" else vectors


    def remove(self, rows):
        pass


class OldPooler:
    def __init__(self, options, setup):
        self.inner = Pooler(options, setup)

    def pool(self, hidden, step):
        assert not hasattr(step, "ends")
        return self.inner.pool(hidden, step)
"""


@pytest.mark.parametrize("group", ["pegboard.pooler.v3", "pegboard.pooler.v2"])
@pytest.mark.parametrize("fault", ["", "plan", "plan raises", "raise", "call", "type"])
def test_another_pooler_is_used_and_named_when_it_fails(
    fault: str,
    group: str,
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of the major version before is served, too, with one warning."""
    is_old = group.endswith("v2")
    point = {group: {"acme": f"acme_pooler:{'OLD' if is_old else 'SPEC'}"}}
    FakeDistributions(tmp_path).add("acme-pooler", point, {"acme_pooler": POOLER})
    monkeypatch.syspath_prepend(tmp_path)
    reference = write("llama")
    settings = {**LIMITS, "pooler": "acme", "pooler_config": {"fault": fault}}
    for cache in (discovery.scan, installed_plugins.installed):
        cache.cache_clear()
    try:
        if fault:  # the first steps of an engine find it, before a request does
            told = "acme_pooler:plan" if fault == "plan" else r"pooler:acme \(acme-pooler 1.0\)"
            with pytest.raises(PegboardError, match=told):
                open_llm(reference.directory, **settings)
            return
        llm = open_llm(reference.directory, **settings)
        prompt = prompts_of((7,))[0]
        found = torch.tensor(llm.embed([prompt], use_tqdm=False)[0].outputs.embedding)
        wanted = expected(reference, prompt, normalized=False)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        assert caplog.text.count("is made for pooler v2, which is served for now") == is_old
    finally:
        for cache in (discovery.scan, installed_plugins.installed):
            cache.cache_clear()

"""Engines that exchange blocks, and real models: the tokens of one engine alone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_kv_connectors import PROMPTS, WINDOWS

from pegboard import LLM, SamplingParams

ASK = {"do_remote_decode": True, "do_remote_prefill": False}


def settings(port: int, connector: str = "P2pNcclConnector") -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"port": port, "timeout_s": 20},
        }
    }


def free_port() -> int:
    """Return a port that is free, and so is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            if port < 65535 and second.connect_ex(("127.0.0.1", port + 1)) != 0:
                return port


def ask(llm: LLM, parameters: list[dict[str, Any] | None], max_tokens: int) -> list[Any]:
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": each},
        )
        for each in parameters
    ]
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    ("model_type", "config", "engine"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"kv_cache_dtype": "int8", "block_size": 16}),
        ("llama", {}, {"dtype": "bfloat16"}),
        ("gemma3_text", WINDOWS, {}),
        pytest.param("llama", {}, {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {}, {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["float32", "int8", "bfloat16", "windows", "two ranks", "two stages"],
)
def test_prompts_come_from_another_engine(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    model_type: str,
    config: Any,
    engine: Any,
) -> None:
    reference = write(model_type, **config)
    check(open_llm, reference.directory, engine, "P2pNcclConnector")


@pytest.mark.parametrize(
    ("connector", "library"),
    [("NixlConnector", "nixl"), ("MooncakeConnector", "mooncake.engine")],
)
def test_prompts_are_read_with_a_library(
    write: Callable[..., Any], open_llm: Callable[..., LLM], connector: str, library: str
) -> None:
    pytest.importorskip(library, exc_type=ImportError)
    check(open_llm, write("gemma3_text", **WINDOWS).directory, {}, connector)


def check(
    open_llm: Callable[..., LLM],
    directory: Path,
    engine: dict[str, Any],
    connector: str,
    distance: int | None = None,
) -> None:
    """distance: tokens between two places where a loaded prefix may end; None = those of a
    block."""
    size = distance or engine.get("block_size", 4)
    with open_llm(directory, **engine) as llm:
        expected = [each.outputs[0].token_ids for each in ask(llm, [None] * len(PROMPTS), 9)]
    with open_llm(directory, **engine, **settings(free_port(), connector)) as prefill:
        told = [each.kv_transfer_params for each in ask(prefill, [ASK] * len(PROMPTS), 1)]
        with open_llm(directory, **engine, **settings(free_port(), connector)) as decode:
            answers = ask(decode, told, 9)
    assert [each.outputs[0].token_ids for each in answers] == expected
    stored = [(len(prompt) - 1) // size * size for prompt in PROMPTS]
    assert [each.num_cached_tokens for each in answers] == stored

"""Prompts that are given as embeddings: the tokens and logprobs of the token prompts whose
embeddings they are."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from pegboard import SamplingParams
from pegboard.errors import RequestError

LENGTHS = (1, 6, 17, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=9, logprobs=3, ignore_eos=True)


def embedded(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference.model.get_input_embeddings()(torch.tensor(ids)).detach()


def prompts(seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 131, (length,), generator=generator).tolist() for length in LENGTHS]


def shown(outputs: list[Any]) -> list[Any]:
    """Tokens, and the logprobs rounded so that the order of additions does not show."""
    return [
        [
            (
                one.token_ids,
                [
                    round(step[token].logprob, 3)
                    for token, step in zip(one.token_ids, one.logprobs, strict=True)
                ],
            )
            for one in output.outputs
        ]
        for output in outputs
    ]


def test_a_repetition_penalty_sees_only_the_output(write: Any, open_llm: Any) -> None:
    """The rows of the prompt have no token ids, so that no token counts as seen in it, not even the
    0 in their place."""
    reference = write("llama")
    ids = prompts()
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=3.0, logit_bias={0: 4.0}
    )
    with open_llm(reference.directory, enable_prompt_embeds=True) as llm:
        outputs = llm.generate(
            [{"prompt_embeds": embedded(reference, one)} for one in ids], params, use_tqdm=False
        )
    for prompt, output in zip(ids, outputs, strict=True):
        said: list[int] = []
        for token in output.outputs[0].token_ids:
            with torch.no_grad():
                logits = reference.model(torch.tensor([prompt + said])).logits[0, -1]
            logits[0] += 4
            seen = torch.tensor(sorted(set(said)), dtype=torch.long)
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 3, logits[seen] * 3)
            assert logits.argmax() == token
            said.append(token)
        assert 0 in said


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True, "block_size": 16}])
def test_same_tokens_as_the_token_prompt(
    write: Any, open_llm: Any, settings: dict[str, Any]
) -> None:
    """In chunks, mixed with token prompts, twice (so that the second time the prefix is cached) and
    with several completions."""
    reference = write("llama")
    ids = prompts()
    seeded = SamplingParams(
        temperature=1,
        seed=3,
        n=2,
        max_tokens=6,
        logprobs=3,
        ignore_eos=True,
        repetition_penalty=1.0,
    )
    with open_llm(reference.directory, enable_prompt_embeds=True, **settings) as llm:
        given: list[Any] = [{"prompt_embeds": embedded(reference, one)} for one in ids]
        mixed: list[Any] = [given[0], ids[1], given[2], ids[3]]
        for params in (GREEDY, seeded):
            expected = shown(llm.generate(ids, params, use_tqdm=False))
            assert shown(llm.generate(given, params, use_tqdm=False)) == expected
            again = llm.generate(given, params, use_tqdm=False)
            assert shown(again) == expected
            assert again[3].num_cached_tokens >= 32
            assert shown(llm.generate(mixed, params, use_tqdm=False)) == expected


def test_preempted_requests_continue(write: Any, open_llm: Any) -> None:
    """18 blocks of 4 tokens do not hold three requests that grow to 57 tokens."""
    reference = write("llama")
    ids = [prompts(seed)[2] for seed in (1, 2, 3)]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True)
    with open_llm(reference.directory) as llm:
        expected = shown(llm.generate(ids, params, use_tqdm=False))
    few = {"num_gpu_blocks_override": 18, "enable_prompt_embeds": True, "disable_log_stats": False}
    with open_llm(reference.directory, **few) as llm:
        given: Any = [{"prompt_embeds": embedded(reference, one)} for one in ids]
        assert shown(llm.generate(given, params, use_tqdm=False)) == expected
        (preemptions,) = [
            metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
        ]
        assert preemptions > 0


def test_other_embeddings_do_not_share_blocks(write: Any, open_llm: Any) -> None:
    """All such prompts have the same placeholder ids. Only their bytes tell them apart."""
    reference = write("qwen3", head_dim=16)
    first = prompts()[3]
    other = prompts(seed=6)[3]
    other[:16] = first[:16]
    with open_llm(reference.directory, enable_prompt_embeds=True) as llm:
        expected = shown(llm.generate([other, [0] * 40], GREEDY, use_tqdm=False))
        llm.generate({"prompt_embeds": embedded(reference, first)}, GREEDY, use_tqdm=False)
        (found,) = llm.generate(
            {"prompt_embeds": embedded(reference, other)[None].numpy()}, GREEDY, use_tqdm=False
        )
        assert found.num_cached_tokens == 16
        assert shown([found]) == expected[:1]
        assert shown(llm.generate([[0] * 40], GREEDY, use_tqdm=False)) == expected[1:]


def test_wrong_embeddings(write: Any, open_llm: Any) -> None:
    reference = write("llama")
    good = torch.zeros(3, 32)
    broken = good.clone()
    broken[1, 4] = float("nan")
    wrong: list[tuple[Any, str]] = [
        (torch.zeros(3, 31), "tokens, 32.*got .3, 31"),
        (torch.zeros(0, 32), "got .0, 32"),
        (torch.zeros(32), "got .32"),
        (torch.zeros(64, 32), "64 tokens"),
        (good.double(), "got dtype float64"),
        ([1.0], "got list"),
        (broken, "row 1 .*NaN"),
        (broken.bfloat16(), "row 1 .*NaN"),
        (torch.full((3, 32), float("-inf")).half(), "row 0 .*infinite"),
    ]
    with open_llm(reference.directory, enable_prompt_embeds=True) as llm:
        for value, words in wrong:
            with pytest.raises(RequestError, match=words):
                llm.generate({"prompt_embeds": value}, use_tqdm=False)
        for parameters in ({"prompt_logprobs": 1}, {"truncate_prompt_tokens": 2}):
            with pytest.raises(RequestError, match="has none"):
                llm.generate({"prompt_embeds": good}, SamplingParams(**parameters), use_tqdm=False)
        assert llm.generate({"prompt_embeds": good.bfloat16()}, GREEDY, use_tqdm=False)[0].finished
    with (
        open_llm(reference.directory) as llm,
        pytest.raises(RequestError, match="enable_prompt_embeds"),
    ):
        llm.generate({"prompt_embeds": good}, use_tqdm=False)


def test_through_a_server(write: Any, open_llm: Any, tmp_path: Path) -> None:
    """Two prompts as embeddings and one of token ids in one request, and rows of the wrong
    width."""
    reference = write("llama")
    ids = prompts()
    with open_llm(reference.directory) as llm:
        expected = [
            output.outputs[0].token_ids for output in llm.generate(ids[1:], GREEDY, use_tqdm=False)
        ]

    def text(rows: torch.Tensor) -> str:
        return base64.b64encode(save({"prompt": rows})).decode()

    flags = [
        "--enable-prompt-embeds",
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
        "--generation-config",
        "vllm",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags += ["--port", str(port), "--kv-cache-memory-bytes", str(4 << 20)]
    with subprocess.Popen(
        [sys.executable, "-m", "pegboard", "serve", str(reference.directory), *flags]
    ) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 120
            while not _is_ready(url):
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            body = {
                "prompt": ids[3],
                "max_tokens": 9,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            given = [text(embedded(reference, one)) for one in ids[1:3]]
            answer = httpx.post(
                f"{url}/v1/completions", json={**body, "prompt_embeds": given}, timeout=60
            )
            assert answer.status_code == 200, answer.text
            assert [choice["token_ids"] for choice in answer.json()["choices"]] == expected
            wrong = httpx.post(
                f"{url}/v1/completions",
                json={**body, "prompt_embeds": text(torch.zeros(2, 31))},
                timeout=60,
            )
            assert (
                wrong.status_code == 400 and "[tokens, 32]" in wrong.json()["error"]["message"]
            ), wrong.text
        finally:
            server.terminate()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False

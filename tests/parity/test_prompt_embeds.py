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


SPANS = [(0, 5), (9, 10), (16, 33), (33, 40)]
"""First and last position of spans of a prompt of 40 tokens."""


def with_spans(reference: Any, ids: list[int], spans: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the prompt with the embeddings of these spans, whose ids are others."""
    rows = {start: embedded(reference, ids[start:stop]) for start, stop in spans}
    hidden = [any(start <= i < stop for start, stop in spans) for i in range(len(ids))]
    others = [7 if is_hidden else token for token, is_hidden in zip(ids, hidden, strict=True)]
    return {"prompt_token_ids": others, "prompt_embeds": rows}


@pytest.mark.parametrize(
    ("model_type", "config", "settings"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"spec_method": "ngram", "spec_tokens": 3}),
        ("gemma3_text", {"head_dim": 16}, {"block_size": 16, "enforce_eager": True}),
        ("mamba2", {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8}, {}),
    ],
)
def test_spans_of_rows_between_tokens(
    write: Any, open_llm: Any, model_type: str, config: Any, settings: Any
) -> None:
    """In chunks of 16 tokens and beside token prompts, first computed and then from the cache."""
    reference = write(model_type, **config)
    ids = prompts()
    long = ids[3]
    with open_llm(reference.directory, enable_prompt_embeds=True, **settings) as llm:
        expected = shown(llm.generate(ids, GREEDY, use_tqdm=False))
        for spans in (SPANS, SPANS[:1], SPANS[1:2], SPANS[2:]):
            given: list[Any] = [*ids[:3], with_spans(reference, long, spans)]
            for _ in range(2):
                assert shown(llm.generate(given, GREEDY, use_tqdm=False)) == expected


def test_spans_run_in_recorded_steps(write: Any, open_llm: Any) -> None:
    reference = write("llama")
    eager = []
    with open_llm(reference.directory, enable_prompt_embeds=True, block_size=16) as llm:
        worker = llm.llm_engine.engine._parts.executor.worker
        assert worker.running.stages.recordings.find("forward", 16) is not None
        model = worker.models[0].model
        plain = model.forward
        model.forward = lambda *given: eager.append(given) or plain(*given)
        prompt: Any = with_spans(reference, prompts()[3], SPANS)
        llm.generate([prompt], GREEDY, use_tqdm=False)
    assert not eager


def test_wrong_spans(write: Any, open_llm: Any) -> None:
    reference = write("llama")
    rows = torch.zeros(3, 32)
    ids = [5, 6, 7, 8, 9]
    wrong: list[tuple[Any, str]] = [
        (rows, "position of the first row: rows"),
        ({-1: rows}, "position of the first row: rows"),
        ({"0": rows}, "position of the first row: rows"),
        ({0: [1.0]}, "got list"),
        ({3: rows}, "positions 3 to 5 of the prompt must be in the positions 0 to 4"),
        ({0: rows, 2: rows}, "positions 2 to 4 of the prompt must be in the positions 3 to 4"),
        ({0: rows[:, :31]}, "expected the shape .tokens, 32."),
        ({0: rows / 0}, "row 0 .*NaN"),
    ]
    with open_llm(reference.directory, enable_prompt_embeds=True) as llm:
        for value, words in wrong:
            prompt: Any = {"prompt_token_ids": ids, "prompt_embeds": value}
            with pytest.raises(RequestError, match=words):
                llm.generate(prompt, use_tqdm=False)
        outside: Any = {"prompt_token_ids": [5, 999], "prompt_embeds": {0: rows[:1]}}
        with pytest.raises(RequestError, match="999 is out of vocabulary"):
            llm.generate(outside, use_tqdm=False)
        for parameters in ({"prompt_logprobs": 1}, {"truncate_prompt_tokens": 2}):
            good: Any = {"prompt_token_ids": ids, "prompt_embeds": {1: rows}}
            with pytest.raises(RequestError, match="has none"):
                llm.generate(good, SamplingParams(**parameters), use_tqdm=False)


def test_penalties_see_the_tokens_and_not_the_rows(write: Any, open_llm: Any) -> None:
    reference = write("llama")
    ids = prompts()[3]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, repetition_penalty=3.0)
    with open_llm(reference.directory, enable_prompt_embeds=True) as llm:
        (output,) = llm.generate([with_spans(reference, ids, SPANS)], params, use_tqdm=False)
    seen = {token for i, token in enumerate(ids) if not any(a <= i < b for a, b in SPANS)}
    said: list[int] = []
    for token in output.outputs[0].token_ids:
        with torch.no_grad():
            logits = reference.model(torch.tensor([ids + said])).logits[0, -1]
        known = torch.tensor(sorted(seen | set(said)))
        logits[known] = torch.where(logits[known] > 0, logits[known] / 3, logits[known] * 3)
        assert logits.argmax() == token
        said.append(token)


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

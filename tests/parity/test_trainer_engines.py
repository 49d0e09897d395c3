"""A trainer in another process sends weights to an `AsyncLLM` while requests run, and to an engine
whose ranks are processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from test_new_weights import PROMPTS, check, write_other
from test_weight_transfer import Trainer, trainer
from test_weight_transfer import place as place  # the fixture
from tiny_models import TOLERANCE, Reference

from pegboard import LLM, AsyncLLM, SamplingParams
from pegboard.errors import RequestError

LENGTH = 600
"""Tokens of an answer: so many that an update comes before its end."""
LONG = {"max_position_embeddings": 800}
PROMPT = list(range(3, 40))
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 4,
    "kv_cache_memory_bytes": 16 << 20,
    "max_num_seqs": 4,
    "generation_config": "vllm",
    "num_threads": 1,
    "weight_transfer": "shared_memory",
}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


class Answer:
    """What a request has got so far. It is read as it comes."""

    def __init__(self, llm: AsyncLLM, name: str, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        self._first = asyncio.Event()
        self._task = asyncio.create_task(self._read(llm, name, max_tokens))

    async def _read(self, llm: AsyncLLM, name: str, max_tokens: int) -> None:
        prompt = {"prompt_token_ids": PROMPT}
        async for output in llm.generate(prompt, greedy(max_tokens), name):
            self.tokens = list(output.outputs[0].token_ids)
            self.reason = output.outputs[0].finish_reason
            self._first.set()

    async def begin(self) -> None:
        """Wait for the first token."""
        await self._first.wait()

    async def end(self) -> None:
        await self._task


def is_greedy(reference: Reference, tokens: list[int], start: int = 0) -> bool:
    """Return whether the model chooses the tokens from `start` on, after those before."""
    rows = reference.logprobs([*PROMPT, *tokens])[len(PROMPT) - 1 + start : -1]
    return all(
        float(row[token]) > float(row.max()) - 2 * TOLERANCE
        for row, token in zip(rows, tokens[start:], strict=True)
    )


async def offered(other: Trainer, folder: Path) -> dict[str, Any]:
    """Return the request for the weights of a folder, which the trainer has ready then."""
    other.say(str(folder))
    return {"update_info": await asyncio.to_thread(other.hear)}


async def numbers(llm: AsyncLLM) -> dict[str, Any]:
    stats = await llm.control("stats")
    assert isinstance(stats, dict)
    return stats


def with_llm(path: Path, use: Callable[[AsyncLLM, Trainer], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with AsyncLLM(str(path), **SETTINGS) as llm:
            with trainer("shared_memory") as other:
                await use(llm, other)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture
def long_models(write: Callable[..., Reference], tmp_path: Path) -> tuple[Reference, Reference]:
    return write("llama", **LONG), write_other(tmp_path / "new", "llama", LONG)


def test_kept_requests_go_on_with_the_weights_of_a_trainer(
    long_models: tuple[Reference, Reference],
) -> None:
    """The engine stays paused, and has no block of the old weights, until it is resumed."""
    old, new = long_models

    async def use(llm: AsyncLLM, other: Trainer) -> None:
        num_free = (await numbers(llm))["num_free_blocks"]
        update = await offered(other, new.directory)
        running = Answer(llm, "running", LENGTH)
        await running.begin()
        await llm.pause_generation(mode="keep", clear_cache=False)
        before = await numbers(llm)
        assert before["num_free_blocks"] < num_free, "the pause keeps the blocks"
        await asyncio.sleep(0.05)  # what was computed before the pause comes
        length = len(running.tokens)
        assert 0 < length < LENGTH - 20 and is_greedy(old, running.tokens)

        await llm.update_weights(update)
        other.say("")
        after = await numbers(llm)
        assert after["num_free_blocks"] == num_free and after["num_cached_blocks"] == 0
        assert not any(map(sum, after["blocks_of"].values()))
        assert await llm.is_paused()
        late = Answer(llm, "late", 20)
        await asyncio.sleep(0.1)
        assert not late.tokens and len(running.tokens) == length

        await llm.resume_generation()
        await running.end()
        await late.end()
        tokens = running.tokens
        assert len(tokens) == LENGTH and running.reason == "length"
        assert is_greedy(old, tokens[:length]) and is_greedy(new, tokens, length)
        assert not is_greedy(old, tokens, length)
        assert is_greedy(new, late.tokens) and len(late.tokens) == 20

    with_llm(old.directory, use)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_end_with_the_old_weights(
    long_models: tuple[Reference, Reference], mode: str
) -> None:
    """The next ones find nothing in the prefix cache, which had the same prompt."""
    old, new = long_models

    async def use(llm: AsyncLLM, other: Trainer) -> None:
        num_free = (await numbers(llm))["num_free_blocks"]
        for name in ("first", "again"):
            await Answer(llm, name, 4).end()
        assert (await numbers(llm))["prefix_cache_hits_total"] > 0
        update = await offered(other, new.directory)
        running = Answer(llm, "running", LENGTH)
        await running.begin()
        await llm.update_weights(update, mode=mode)
        other.say("")
        await running.end()
        assert running.reason == ("abort" if mode == "abort" else "length")
        assert len(running.tokens) == LENGTH or mode == "abort"
        assert is_greedy(old, running.tokens)
        after = await numbers(llm)
        assert after["num_free_blocks"] == num_free and after["num_cached_blocks"] == 0
        assert not await llm.is_paused()

        following = Answer(llm, "following", 20)
        await following.end()
        hits = after["prefix_cache_hits_total"]
        assert (await numbers(llm))["prefix_cache_hits_total"] == hits
        assert is_greedy(new, following.tokens) and not is_greedy(old, following.tokens)
        repeated = Answer(llm, "repeated", 20)
        await repeated.end()
        assert (await numbers(llm))["prefix_cache_hits_total"] > hits
        assert repeated.tokens == following.tokens

    with_llm(old.directory, use)


def test_ranks_in_processes_get_weights_through_gloo(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    place: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Each rank is one of the trainer's group. Places that are too few are refused before."""
    old = write("llama")
    new = write_other(tmp_path / "new", "llama", {})
    settings: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "num_threads": 1,
        "weight_transfer": "torch",
    }
    with open_llm(old.directory, **settings) as llm:
        with pytest.raises(RequestError, match="must be at least 3") as refusal:
            llm.init_weight_transfer_engine({"init_info": place})
        assert refusal.value.parameter == "init_info"
        with trainer("torch", str(place["master_port"]), "3") as other:
            llm.init_weight_transfer_engine({"init_info": {**place, "world_size": 3}})
            check(llm, old, PROMPTS)
            for reference in (new, old, new):
                other.say(str(reference.directory))
                llm.update_weights({"update_info": other.hear()})
                other.say("")
                check(llm, reference, PROMPTS)

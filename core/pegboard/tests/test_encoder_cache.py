"""Which items a step encodes and which rows are kept. `test_engine_random` checks with random work
that rows are there when a step needs them, and that both limits hold."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pegboard.data.batch import Batch
from pegboard.data.media import MediaItem
from pegboard.data.request import EngineRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.actions import UpdateWeights
from pegboard_testing.fake_engine import FakeEngine

LIMITS: dict[str, Any] = {
    "max_num_encoder_input_tokens": 6,
    "encoder_cache_size": 8,
    "max_num_batched_tokens": 16,
    "enable_prefix_caching": False,
}


def item(name: str, start: int, count: int = 4) -> MediaItem:
    return MediaItem("image", name, ((start, count),), {})


def batches(engine: FakeEngine, *items: MediaItem, length: int = 14) -> list[Batch]:
    """Return the steps of one request with these items."""
    before = len(engine.executor.batches)
    request = EngineRequest(
        request_id=f"r{before}",
        prompt_token_ids=[5] * length,
        params=SamplingParams(max_tokens=2, temperature=0, ignore_eos=True),
        media=items,
    )
    engine.engine.add(request)
    while engine.engine.has_work:
        engine.step()
    return engine.executor.batches[before:]


def encoded(steps: list[Batch]) -> list[list[str]]:
    return [[each.digest for each in step.encode] for step in steps if step.encode]


def chunks(steps: list[Batch]) -> list[int]:
    return [step.num_tokens for step in steps if step.num_tokens > 1]


def test_a_chunk_ends_before_an_item_that_is_over_the_budget() -> None:
    steps = batches(FakeEngine(**LIMITS), item("a", 1), item("b", 8))
    assert encoded(steps) == [["a"], ["b"]] and chunks(steps) == [8, 6]


@pytest.mark.parametrize(("is_whole", "expected"), [(False, [10, 4]), (True, [8, 6])])
def test_items_may_be_kept_whole(is_whole: bool, expected: list[int]) -> None:
    limits = {**LIMITS, "max_num_batched_tokens": 10, "disable_chunked_mm_input": is_whole}
    assert chunks(batches(FakeEngine(**limits), item("a", 8))) == expected


def test_an_item_that_is_the_last_token_alone() -> None:
    limits = {**LIMITS, "max_num_batched_tokens": 10}
    steps = batches(FakeEngine(**limits), item("a", 10, 1), length=11)
    assert encoded(steps) == [["a"]] and [step.num_tokens for step in steps] == [10, 1, 1]


def test_the_longest_unused_rows_go_first() -> None:
    engine = FakeEngine(**LIMITS)
    order = ["a", "b", "a", "c", "a", "b"]  # there is room for two
    steps = [encoded(batches(engine, item(name, 2))) for name in order]
    assert steps == [[["a"]], [["b"]], [], [["c"]], [], [["b"]]]


def test_items_are_counted() -> None:
    engine = FakeEngine(**LIMITS)
    kept = msgspec.structs.replace(item("a", 9), was_kept=True)
    batches(engine, item("a", 2), kept)
    stats = engine.engine.stats()
    assert (stats["mm_cache_queries_total"], stats["mm_cache_hits_total"]) == (2, 1)


def test_an_item_larger_than_all_limits() -> None:
    engine = FakeEngine(**LIMITS)
    assert encoded(batches(engine, item("a", 2))) == [["a"]]
    assert encoded(batches(engine, item("large", 1, 12))) == [["large"]]
    assert encoded(batches(engine, item("a", 2))) == [["a"]]


def test_other_weights_make_other_rows() -> None:
    engine = FakeEngine(**LIMITS)
    assert encoded(batches(engine, item("a", 2))) == [["a"]]
    assert encoded(batches(engine, item("a", 2))) == []
    engine.ask(UpdateWeights(path="/other"))
    assert encoded(batches(engine, item("a", 2))) == [["a"]]

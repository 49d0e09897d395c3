"""Tokens that attend to those after them: which steps compute them, what the hashes of their blocks
depend on, and what the workers get."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.batch import NewRequest
from pegboard.data.media import MediaItem
from pegboard.data.request import EngineRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.kv.hashes import BlockHasher
from pegboard.engine.requests import Request, completions_of
from pegboard.engine.whole_spans import check_whole, cut
from pegboard.errors import RequestError
from pegboard.worker.visible_keys import VisibleKeys
from pegboard_testing.fake_engine import FakeEngine
from pegboard_testing.fake_limits import fake_limits

Whole = Literal["items", "prompt"]


def spans() -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Return a strategy of spans in order, some of which are next to each other."""
    pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=4)

    def placed(drawn: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        found = []
        place = 0
        for gap, length in drawn:
            found.append((place + gap, place + gap + length))
            place += gap + length
        return tuple(found)

    return pairs.map(placed)


@given(spans(), st.integers(0, 30), st.integers(1, 20), st.integers(0, 12))
def test_no_step_ends_inside_a_span(
    whole: tuple[tuple[int, int], ...], start: int, num_tokens: int, extra: int
) -> None:
    most = num_tokens + extra
    count = cut(whole, start, num_tokens, most)
    assert 0 <= count <= most
    assert not any(first < start + count < stop for first, stop in whole if count)
    if count == 0:
        assert any(first <= start < stop and stop - start > most for first, stop in whole)
    if not any(first < start + num_tokens < stop for first, stop in whole):
        assert count == num_tokens


def request_of(tokens: list[int], *items: MediaItem) -> EngineRequest:
    params = SamplingParams(max_tokens=2, ignore_eos=True, n=2, seed=1)
    return EngineRequest(request_id="r", prompt_token_ids=tokens, params=params, media=items)


def hashes(request: EngineRequest, whole: Whole | None) -> list[bytes]:
    (first, _) = completions_of(request, whole)
    BlockHasher("sha256", 4).extend(first)
    return first.block_hashes


@given(st.lists(st.integers(0, 9), min_size=12, max_size=12), st.integers(0, 11))
def test_blocks_of_a_whole_prompt_depend_on_all_of_it(tokens: list[int], place: int) -> None:
    other = [*tokens]
    other[place] += 1
    before, after = (hashes(request_of(each), "prompt") for each in (tokens, other))
    assert not {*before} & {*after}
    assert before == hashes(request_of([*tokens]), "prompt")
    causal = hashes(request_of(tokens), None)
    assert causal[: place // 4] == hashes(request_of(other), None)[: place // 4]


def test_blocks_of_a_whole_prompt_depend_on_its_items() -> None:
    first, other = (MediaItem("image", name, ((9, 3),), {}) for name in "ab")
    tokens = [5] * 12
    assert not {*hashes(request_of(tokens, first), "prompt")} & {
        *hashes(request_of(tokens, other), "prompt")
    }


def test_blocks_before_an_item_do_not_depend_on_it() -> None:
    item = MediaItem("image", "a", ((5, 6),), {})
    with_item, without = (hashes(request_of([5] * 12, *items), "items") for items in ([item], []))
    assert with_item[0] == without[0] and with_item[1] != without[1]


def test_all_completions_have_the_spans() -> None:
    item = MediaItem("image", "a", ((1, 2), (5, 3)), {})
    for completion in completions_of(request_of([5] * 9, item), "items"):
        assert completion.whole == ((1, 3), (5, 8))
    assert Request.of(request_of([5], item)).whole == ()


@pytest.mark.parametrize(
    ("whole", "limits", "message"),
    [
        ("items", {"max_num_batched_tokens": 8}, "item at token 11 has 9 tokens.*tokens=8; raise"),
        ("prompt", {"max_num_batched_tokens": 19}, "the prompt has 20 tokens.*tokens=19; raise"),
        ("prompt", {"max_num_encoder_input_tokens": 10}, "have 11 rows.*input_tokens is 10"),
        ("prompt", {"encoder_cache_size": 10}, "have 11 rows.*encoder_cache_size is 10"),
    ],
)
def test_what_no_step_can_compute(whole: Whole, limits: dict[str, int], message: str) -> None:
    items = [MediaItem("image", "a", ((1, 2),), {}), MediaItem("image", "b", ((11, 9),), {})]
    request = request_of([5] * 20, *items)
    most = {"max_num_batched_tokens": 20, "max_num_encoder_input_tokens": 11}
    check_whole(request, fake_limits(whole=whole, encoder_cache_size=11, **most))
    with pytest.raises(RequestError, match=message) as refused:
        check_whole(request, fake_limits(whole=whole, **{**most, **limits}))
    assert refused.value.parameter == "prompt"


@pytest.mark.parametrize(
    ("whole", "limits", "expected"),
    [
        ("items", {"max_num_batched_tokens": 8}, [3, 8, 3]),
        ("items", {"max_num_batched_tokens": 12}, [12, 2]),
        ("items", {"long_prefill_token_threshold": 2}, [2, 1, 8, 2, 1]),
        ("prompt", {"max_num_batched_tokens": 14}, [14]),
        ("prompt", {"long_prefill_token_threshold": 2}, [14]),
        (None, {"max_num_batched_tokens": 8}, [8, 6]),
    ],
)
def test_chunks(whole: Whole | None, limits: dict[str, Any], expected: list[int]) -> None:
    """The item has the tokens 3 … 10. It is computed beyond the limit of chunks."""
    settings = {"max_num_batched_tokens": 20, "max_num_encoder_input_tokens": 9, **limits}
    engine = FakeEngine(whole=whole, enable_prefix_caching=False, max_num_seqs=2, **settings)
    request = request_of([5] * 14, MediaItem("image", "a", ((3, 8),), {}))
    request.params.n = 1
    engine.engine.add(request)
    while engine.engine.has_work:
        engine.step()
    sizes = [batch.num_tokens for batch in engine.executor.batches]
    assert sizes[: len(expected)] == expected


@given(spans(), spans(), st.integers(0, 20), st.integers(1, 20))
def test_how_many_keys_each_token_attends_to(
    before: tuple[tuple[int, int], ...], whole: tuple[tuple[int, int], ...], start: int, count: int
) -> None:
    """A row had another request before."""
    visible = VisibleKeys(2, 48)
    for each in (before, whole):
        none = np.zeros(0, np.int32)
        visible.add(NewRequest(1, "r", none, 0, 0, SamplingParams(), None, (), whole=each))
    positions = np.arange(start, start + count)
    expected = [
        next((stop for first, stop in whole if first <= p < stop), p + 1)
        for p in positions.tolist()
    ]
    found = visible.of(np.full(count, 1), positions)
    if expected == (positions + 1).tolist():
        assert found is None
    else:
        assert found is not None and found.tolist() == expected

"""Which recording serves a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.worker.recordings import Recordings
from pegboard.worker.stages import TRAITS

WITHOUT = (False,)


class Sizes:
    """A replay that records the given sizes, and the largest one, at most `most`."""

    def __init__(self, pads: bool, sizes: Sequence[int], most: int = 1000) -> None:
        self.pads = pads
        self._sizes = sizes
        self._most = most

    def sizes(self, trait: str, largest: int) -> Sequence[int]:
        if trait == "forward":
            return ()
        largest = min(largest, self._most)
        return sorted({size for size in self._sizes if size <= largest} | {largest})

    def record(self, run: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
        return SimpleNamespace(size=len(inputs[0]))

    def reset(self) -> None: ...


def recorded(replay: Sizes, max_rows: int, max_tokens: int, max_drafts: int) -> Recordings:
    inputs: Any = SimpleNamespace(
        max_rows=max_rows, max_tokens=max_tokens, has_adapters=False, blank=lambda *sizes: sizes
    )
    made = Recordings(inputs, TRAITS, max_drafts)
    runs = {trait: (lambda *inputs: inputs, [torch.zeros(max_tokens)]) for trait in TRAITS}
    made.record(replay, runs, WITHOUT, lambda step: None, lambda trait: "")
    assert made.reasons() == []
    return made


@given(st.data())
def test_a_recording_has_room_for_the_step(data: st.DataObject) -> None:
    max_rows = data.draw(st.integers(1, 20))
    max_drafts = data.draw(st.integers(0, 5))
    max_tokens = data.draw(st.integers(max_rows, 200))
    replay = Sizes(data.draw(st.booleans()), data.draw(st.lists(st.integers(1, 120))))
    made = recorded(replay, max_rows, max_tokens, max_drafts)
    assert bool(made.by_trait.get(("verify", False))) <= bool(max_drafts)
    counts = data.draw(st.lists(st.integers(1, 1 + max_drafts), min_size=1, max_size=max_rows))
    num_rows = len(counts)
    num_tokens = sum(counts)
    found = made.find_whole(num_rows, num_tokens)
    if found is None:
        assert num_tokens > max_rows, "the largest recording has a token for each row"
        return
    assert num_tokens <= found.num_tokens == found.recording.size <= max_tokens
    assert num_rows <= found.num_rows <= max_rows
    assert found.padded == ((found.num_rows, found.num_tokens) if replay.pads else (0, 0))
    others = [each for each in made.by_trait["decode", False] if each.num_tokens >= num_tokens]
    if replay.pads and others:
        assert found.num_tokens <= max(others[0].num_tokens, 2 * num_tokens)


@given(st.integers(2, 20), st.integers(1, 5))
def test_one_recording_is_enough_if_it_serves_any_rows(max_rows: int, max_drafts: int) -> None:
    made = recorded(Sizes(False, ()), max_rows, 400, max_drafts)
    assert [each.num_tokens for each in made.by_trait["verify", False]] == [
        max_rows * (1 + max_drafts)
    ]
    assert made.by_trait["decode", False] == []
    made = recorded(Sizes(False, (), max_rows - 1), max_rows, 400, max_drafts)
    assert len(made.by_trait["decode", False]) == 1, "the other one is too small for all rows"


def test_adapters_that_a_recording_cannot_compute_are_not_replayed() -> None:
    inputs: Any = SimpleNamespace(
        max_rows=4, max_tokens=8, has_adapters=False, blank=lambda *sizes: sizes
    )
    eager: set[int] = set()
    recordings = Recordings(inputs, TRAITS, 0, eager)
    runs = {trait: (lambda *inputs: inputs, [torch.zeros(8)]) for trait in TRAITS}
    replay: Any = Sizes(True, (1, 2))
    recordings.record(replay, runs, (False, True), lambda step: None, lambda trait: "")
    for inputs.has_adapters in (True, False):
        assert recordings.find("decode", 1) is not None
        eager.add(1)
        assert (recordings.find("decode", 1) is None) == inputs.has_adapters
        eager.clear()

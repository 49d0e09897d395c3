"""The KV events of the memory say what is in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kv_connector_offload.options import OffloadOptions
from pegboard_kv_connector_offload.scheduler import OffloadScheduler
from pegboard_kv_connector_offload.worker import OffloadWorker

from pegboard.engine.actions import ResetPrefixCache
from pegboard.interfaces.attention import Full, Retain, State, Window
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.interfaces.metrics import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    Sample,
)
from pegboard_testing.contract_kv_connector import Halves, TorchViews, greedy
from pegboard_testing.fake_engine import FakeEngine

Block = tuple[int, bytes]


class Recorder:
    """A sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    def declare(self, metrics: object) -> None:
        pass

    def publish(self, sample: Sample) -> None:
        self.events += sample.kv_events

    def close(self) -> None:
        pass


def offloading(
    retains: Sequence[Retain], num_slots: int, recorder: Recorder, num_blocks: int | None = None
) -> FakeEngine:
    options = OffloadOptions(num_cpu_blocks=num_slots)

    def halves(setup: KVConnectorSetup) -> Halves:
        return OffloadScheduler(options, setup), TorchViews(OffloadWorker(options, setup))

    return FakeEngine(
        retains, kv=halves, metrics=[recorder], reports_kv_events=True, num_blocks=num_blocks
    )


def held(events: Sequence[KVEvent], medium: str | None) -> set[Block]:
    """Return what a router believes to be in a memory. No block may be stored twice."""
    blocks: set[Block] = set()
    for event in events:
        if isinstance(event, BlocksCleared):
            blocks.clear()
        elif event.medium == medium:
            names = {(event.group, each) for each in event.block_hashes}
            if isinstance(event, BlocksStored):
                assert not names & blocks
                blocks |= names
            else:
                assert names <= blocks
                blocks -= names
    return blocks


def contents(events: Sequence[KVEvent], medium: str | None) -> dict[Block, object]:
    """Return what the events say of each block: the one before it, and its tokens."""
    known: dict[Block, object] = {}
    for event in events:
        if isinstance(event, BlocksStored) and event.medium == medium:
            parent = event.parent_hash
            for number, name in enumerate(event.block_hashes):
                start = number * event.block_size
                tokens = event.token_ids[start : start + event.block_size]
                known[event.group, name] = (parent, tokens)
                parent = name
    return known


@pytest.mark.parametrize(
    "retains", [[Full()], [Full(), Window(6)], [Full(), State(checkpoint_every=8)]], ids=str
)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.sampled_from([5, 20, 1000]))
def test_the_events_are_the_memory(
    retains: list[Retain], starts: list[int], num_slots: int
) -> None:
    """They are what the slots hold, and say of a block what those of the KV cache say."""
    recorder = Recorder()
    engine = offloading(retains, num_slots, recorder)
    for start in starts:
        engine.generate(range(start, start + 21), greedy(3))
    assert isinstance(engine.connector, OffloadScheduler)
    slots = engine.connector._store
    has_tokens = [not isinstance(retain, State) for retain in engine.model.retains]
    names = {name for name in slots._slots if has_tokens[name[0]]}  # type: ignore[attr-defined]
    assert held(recorder.events, "CPU") == names
    of_cache = contents(recorder.events, None)
    of_memory = contents(recorder.events, "CPU")
    assert of_memory
    assert all(of_cache.get(name, content) == content for name, content in of_memory.items())


def test_events_of_both_memories_are_told_apart() -> None:
    """The KV cache drops blocks that the memory keeps."""
    recorder = Recorder()
    engine = offloading([Full()], 1000, recorder, num_blocks=18)
    for start in range(8):
        engine.generate(range(start, start + 33), greedy(1))
    removed = {e.medium for e in recorder.events if isinstance(e, BlocksRemoved)}
    assert removed == {None}
    assert held(recorder.events, "CPU") > held(recorder.events, None) != set()


def test_after_a_reset_only_new_blocks_are_told() -> None:
    recorder = Recorder()
    engine = offloading([Full()], 1000, recorder)
    engine.generate(range(21), greedy(1))
    assert engine.ask(ResetPrefixCache())
    engine.generate([*range(21), *range(40, 60)], greedy(1))
    cleared = recorder.events.index(BlocksCleared())
    (event,) = [e for e in recorder.events[cleared:] if isinstance(e, BlocksStored) and e.medium]
    assert len(event.block_hashes) == 5, "21 … 40 tokens"
    assert event.parent_hash in contents(recorder.events, None)[0, event.block_hashes[0]]  # type: ignore[operator]

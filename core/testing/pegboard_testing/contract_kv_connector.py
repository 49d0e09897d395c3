"""Contract tests of the kind `kv_connector`. A plugin's test file:

class TestMyConnector(KVConnectorContract):
    def halves(self, setup: KVConnectorSetup) -> Halves:
        return MyScheduler(options, setup), MyWorker(options, setup)

The halves drive a whole engine with a fake model, whose tokens depend on every value that it reads
from the KV memory.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from pegboard.data.batch import TransferReport
from pegboard.data.request import EngineRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.data.transfers import TransferMerger
from pegboard.engine.actions import ResetPrefixCache
from pegboard.interfaces.attention import Chunk, Full, KVGroup, KVView, Retain, Window
from pegboard.interfaces.kv_connector import KVConnectorSetup, KVConnectorWorker
from pegboard_testing.fake_connectors import Halves
from pegboard_testing.fake_engine import FakeEngine, expected_tokens

__all__ = ["Halves", "KVConnectorContract", "greedy"]

GROUPS: list[list[Retain]] = [
    [Full()],
    [Full(), Window(6)],
    [Window(9), Chunk(8)],
    [Full(), Full(), Window(5, sinks=3)],
]


class TorchViews:
    """A worker half on the fake worker's memory, which it gets as tensors."""

    def __init__(self, half: KVConnectorWorker) -> None:
        self._half = half

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        tensors = {
            layer: {name: torch.from_numpy(array) for name, array in view.items()}
            for layer, view in views.items()
        }
        self._half.register(tensors, groups)

    def save(self, plan: bytes) -> None:
        self._half.save(plan)

    def begin(self, plan: bytes) -> None:
        self._half.begin(plan)

    def end(self) -> TransferReport:
        return self._half.end()

    def close(self) -> None:
        self._half.close()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


class KVConnectorContract:
    """Every connector passes these. Override `halves`. outlives: what one engine has saved, the
    next one finds."""

    outlives = True

    def halves(self, setup: KVConnectorSetup) -> Halves:
        """Return the halves of a connector. All connectors of a test have the same store, if it
        outlives an engine."""
        raise AssertionError("override KVConnectorContract.halves")

    def engine(
        self, retains: Sequence[Retain] = (Full(),), identity: str = "a", **arguments: Any
    ) -> FakeEngine:
        """Return an engine with the connector."""

        def wrapped(setup: KVConnectorSetup) -> Halves:
            scheduler, worker = self.halves(setup)
            return scheduler, TorchViews(worker)

        return FakeEngine(retains, kv=wrapped, identity=identity, **arguments)

    def after(self, engine: FakeEngine, **arguments: Any) -> FakeEngine:
        """Return an engine that finds what `engine` has saved: a new one, or the same without its
        prefix cache."""
        engine.check_idle()
        if not self.outlives:
            assert engine.ask(ResetPrefixCache())
            return engine
        self.close(engine)
        return self.engine(engine.model.retains, engine.plan.identity, **arguments)

    def close(self, engine: FakeEngine) -> None:
        for connector in engine.worker.connectors.values():
            connector.close()

    @pytest.mark.parametrize("retains", GROUPS, ids=str)
    def test_a_prefix_is_loaded(self, retains: list[Retain]) -> None:
        first = self.engine(retains)
        expected = first.generate(range(21), greedy(6)).token_ids
        second = self.after(first)
        result = second.generate(range(21), greedy(6))
        assert result.token_ids == expected
        assert result.deltas[0].num_cached_tokens == 20, "5 blocks of 4 tokens were computed before"
        assert second.engine.stats()["external_prefix_cache_hits_total"] == 20
        second.check_idle()
        self.close(second)

    @pytest.mark.parametrize("retains", GROUPS, ids=str)
    def test_a_shorter_prefix_is_loaded_too(self, retains: list[Retain]) -> None:
        """Also where a window had dropped the blocks before the request ended."""
        first = self.engine(retains)
        first.generate(range(40), greedy(9))
        second = self.after(first)
        prompt = [*range(22), 60, 61]
        result = second.generate(prompt, greedy(6))
        assert result.deltas[0].num_cached_tokens == 20
        expected = EngineRequest(request_id="", prompt_token_ids=prompt, params=greedy(6))
        assert result.token_ids == expected_tokens(second.model, expected)[0]
        self.close(second)

    def test_blocks_of_another_model_are_not_loaded(self) -> None:
        first = self.engine()
        first.generate(range(21), greedy(2))
        self.close(first)
        other = self.engine(identity="b")
        assert other.generate(range(21), greedy(2)).deltas[0].num_cached_tokens == 0
        self.close(other)

    def test_an_abort_in_a_load_leaves_nothing(self) -> None:
        first = self.engine()
        first.generate(range(21), greedy(2))
        second = self.after(first)
        for number in range(4):
            second.add("again", range(21), greedy(2))
            for _ in range(number):
                second.step()
            second.engine.abort(["again"])
            second.run()
            second.check_idle()
            second.results.clear()
            assert second.ask(ResetPrefixCache())
        self.close(second)

    @pytest.mark.parametrize("seed", range(10))
    def test_every_request_gets_the_tokens_it_gets_alone(self, seed: int) -> None:
        """Requests with shared prefixes, few blocks, preemption, chunks, steps in flight and
        aborts."""
        chance = random.Random(seed)
        max_drafts = chance.choice([0, 0, 2])
        self.check_alone(chance, chance.choice(GROUPS), max_drafts)

    def check_alone(
        self, chance: random.Random, retains: Sequence[Retain], max_drafts: int
    ) -> None:
        """Check the tokens of random requests in random engines, one after the other."""
        arguments = {
            "block_size": chance.choice([1, 2, 4]),
            "spare_blocks": chance.randint(0, 16),
            "max_num_seqs": chance.randint(1, 4),
            "max_num_batched_tokens": chance.randint(5, 40),
            "max_in_flight": chance.randint(1, 3),
            "max_drafts": max_drafts,
        }
        engine = self.engine(retains, **arguments)
        for _ in range(2):
            requests = {f"r{number}": _request(chance, f"r{number}") for number in range(9)}
            for request in requests.values():
                engine.engine.add(request)
                for _ in range(chance.randint(0, 3)):
                    engine.step()
                if chance.random() < 0.15:
                    engine.engine.abort([request.request_id])
            engine.run()
            engine.check_results(requests)
            engine.results.clear()
            engine = self.after(engine, **arguments)
        self.close(engine)

    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_every_rank_moves_its_own_part(self, num_ranks: int) -> None:
        """The halves of all ranks get the plans of one scheduler half. Their memories differ."""
        self.check_ranks([Full(), Window(6)], num_ranks)

    def check_ranks(self, retains: Sequence[Retain], num_ranks: int) -> None:
        """Check that every rank loads what it has saved."""
        probe = FakeEngine(retains, identity="ranks")
        engine = self.engine(retains, "ranks")
        workers = [self._rank(engine, rank) for rank in range(1, num_ranks)]
        result = engine.generate(range(21), greedy(6))
        assert result.token_ids == probe.generate(range(21), greedy(6)).token_ids
        engine = self.after(engine)
        again = (
            workers
            if not self.outlives
            else [self._rank(engine, rank) for rank in range(1, num_ranks)]
        )
        for memory, _ in again:
            memory.fill_(-5)
        assert engine.generate(range(21), greedy(6)).token_ids == result.token_ids
        for memory, _ in again:
            assert (memory >= 10_000).any(), "the rank has loaded its own blocks"
            assert not ((memory >= 0) & (memory < 10_000)).any(), (
                "the rank has loaded another rank's blocks"
            )
        self.close(engine)

    def _rank(self, engine: FakeEngine, rank: int) -> tuple[torch.Tensor, KVConnectorWorker]:
        """Let the worker half of another rank run in the engine's steps. Its memory follows that of
        rank 0, plus 10,000."""
        setup = KVConnectorSetup(engine.plan, rank)
        half = self.halves(setup)[1]
        memory = torch.full(engine.worker.memory.shape, -1, dtype=torch.int64)
        half.register(
            {layer: {"kv": memory} for group in engine.plan.groups for layer in group.layers},
            engine.plan.groups,
        )
        engine.worker.connectors["fake"] = _SecondRank(
            engine.worker.connectors["fake"], half, memory, engine.worker
        )
        return memory, half


class _SecondRank:
    """Calls the halves of two ranks, and merges their reports."""

    def __init__(
        self, first: KVConnectorWorker, second: KVConnectorWorker, memory: torch.Tensor, worker: Any
    ) -> None:
        self._halves = (first, second)
        self._memory = memory
        self._worker = worker
        self._reports = TransferMerger(2)
        self._before = worker.memory.copy()

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        raise AssertionError("both halves are registered")

    def save(self, plan: bytes) -> None:
        for half in self._halves:
            half.save(plan)

    def begin(self, plan: bytes) -> None:
        for half in self._halves:
            half.begin(plan)
        self._before = self._worker.memory.copy()

    def end(self) -> TransferReport:
        changed = torch.from_numpy(self._worker.memory != self._before)
        self._memory[changed] = torch.from_numpy(self._worker.memory)[changed] + 10_000
        for rank, half in enumerate(self._halves):
            self._reports.add(rank, {"fake": half.end()})
        merged = self._reports.take()["fake"]
        assert not merged.failed
        return merged

    def close(self) -> None:
        for half in self._halves:
            half.close()


def _request(chance: random.Random, request_id: str) -> EngineRequest:
    prompt = [(7 * i + 3) % 64 for i in range(chance.randint(0, 40))] + [
        chance.randrange(64) for _ in range(chance.randint(1, 4))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=chance.choice([1, 2, 9, 20]))
    if chance.random() < 0.3:
        params = SamplingParams(
            temperature=1.0, seed=chance.randrange(4), n=chance.randint(1, 3), max_tokens=5
        )
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params)

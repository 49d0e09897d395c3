"""The connector fills what a prompt would have stored, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pegboard_kv_connector_decode_bench.options import DecodeBenchOptions
from pegboard_kv_connector_decode_bench.scheduler import DecodeBenchScheduler
from pegboard_kv_connector_decode_bench.worker import DecodeBenchWorker

from pegboard.engine.actions import ResetPrefixCache
from pegboard.interfaces.attention import Full, KVGroup, Retain, Window
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.plan import Place, TransferPlan, encode
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_kv_connector import GROUPS, Halves, KVConnectorContract, greedy
from pegboard_testing.fake_engine import FakeEngine


@pytest.mark.parametrize("name", ["decode_bench", "DecodeBenchConnector"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("kv_connector", name))


class TestDecodeBench(KVConnectorContract):
    """What the contract says about right answers cannot hold."""

    outlives = False
    test_a_prefix_is_loaded = None  # type: ignore[assignment]
    test_a_shorter_prefix_is_loaded_too = None  # type: ignore[assignment]
    test_blocks_of_another_model_are_not_loaded = None  # type: ignore[assignment]
    test_every_request_gets_the_tokens_it_gets_alone = None  # type: ignore[assignment]
    test_every_rank_moves_its_own_part = None  # type: ignore[assignment]

    def halves(self, setup: KVConnectorSetup) -> Halves:
        options = DecodeBenchOptions(fill_mean=7)
        return DecodeBenchScheduler(options, setup), DecodeBenchWorker(options, setup)

    @pytest.mark.parametrize("retains", GROUPS, ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 21])
    def test_only_the_last_token_of_a_prompt_is_computed(
        self, retains: Sequence[Retain], num_tokens: int
    ) -> None:
        engine = self.engine(retains)
        result = engine.generate(range(num_tokens), greedy(6))
        assert len(result.token_ids) == 6 and result.deltas[0].num_cached_tokens == num_tokens - 1
        assert engine.worker.num_tokens == 6
        assert engine.engine.stats()["external_prefix_cache_hits_total"] == num_tokens - 1
        engine.check_idle()

    def test_blocks_of_other_requests_are_left_alone(self) -> None:
        """The prefix cache has the first blocks of the second prompt."""
        engine = self.engine()
        engine.generate(range(9), greedy(1))
        filled = (engine.worker.memory == 7).copy()
        engine.worker.memory[filled] = 8
        result = engine.generate([*range(8), *range(40, 50)], greedy(1))
        assert result.deltas[0].num_cached_tokens == 17
        assert (engine.worker.memory[filled] == 8).sum() >= 8, "two blocks are shared"
        engine.check_idle()

    @pytest.mark.parametrize("seed", range(8))
    def test_every_request_ends(self, seed: int) -> None:
        """Few blocks, preemption, steps in flight, aborts."""
        engine = self.engine(
            GROUPS[seed % len(GROUPS)], spare_blocks=seed, max_in_flight=1 + seed % 3
        )
        for number in range(9):
            name = f"r{number}"
            engine.add(name, range(3 + 5 * number), greedy(9))
            for _ in range(seed % 3):
                engine.step()
            if number % 4 == 3:
                engine.engine.abort([name])
        engine.run()
        lengths = [len(result.token_ids) for result in engine.results.values()]
        assert lengths.count(9) >= 7
        engine.check_idle()
        assert engine.ask(ResetPrefixCache())


@pytest.mark.parametrize("std", [0.0, 2.0])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8]
)
def test_blocks_are_filled(std: float, dtype: torch.dtype) -> None:
    plan = FakeEngine([Full(), Window(6)]).plan
    worker = DecodeBenchWorker(
        DecodeBenchOptions(fill_mean=3, fill_std=std), KVConnectorSetup(plan)
    )
    memory = torch.zeros(8, 2, 64, 16).to(dtype)
    groups = [KVGroup((0,), plan.groups[0].spec, 4), KVGroup((1,), plan.groups[1].spec, 4)]
    worker.register({0: {"k": memory}, 1: {"k": memory}}, groups)
    plan_bytes = encode(
        TransferPlan(
            {"a": [Place(0, 2, 0, b"", 0), Place(1, 5, 0, b"", 0)], "b": [Place(0, 3, 0, b"", 0)]}
        )
    )
    worker.save(plan_bytes)
    worker.begin(plan_bytes)
    assert sorted(worker.end().loaded) == ["a", "b"]
    values = memory.float()
    assert not values[[0, 1, 4, 6, 7]].any()
    filled = values[[2, 3, 5]]
    if std:
        assert dtype is torch.uint8 or filled.mean() == pytest.approx(3, abs=0.7)
        assert filled.std() > 1 and not torch.equal(filled[0], filled[1])
    else:
        assert (filled == 3).all()


def test_the_engine_says_that_answers_mean_nothing(caplog: pytest.LogCaptureFixture) -> None:
    TestDecodeBench().engine()
    assert "every answer of this engine is meaningless" in caplog.text


def test_wrong_options() -> None:
    for values in ({"fill_std": -1}, {"fill_mean": float("nan")}, {"fill": 1}):
        with pytest.raises(ValueError, match="fill"):
            DecodeBenchOptions(**values)
    assert DecodeBenchOptions() == DecodeBenchOptions(fill_mean=0.015, fill_std=0)

"""Engines that share out experts: what they compute together, and when they take steps."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.config.data_parallel import check_expert_engines
from pegboard.config.schema import EngineConfig, check_engine
from pegboard.data.batch import CSR, StepOutput
from pegboard.engine.lockstep import Alone, Lockstep
from pegboard.errors import ConfigError
from pegboard.interfaces.executor import Place
from pegboard.layers import Experts, RouterRule
from pegboard.layers.engine_rows import EngineRows
from pegboard.layers.shards import Group
from pegboard.worker.parts import join_engines
from pegboard_testing.fake_build import fake_build, load_layers
from pegboard_testing.fake_collective import FakeCollective, on_ranks

HIDDEN, WIDTH, NUM_EXPERTS = 6, 10, 7
NO_WAVE = (False, False, 0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights() -> dict[str, Tensor]:
    shapes = {
        "gate_proj": (WIDTH, HIDDEN),
        "up_proj": (WIDTH, HIDDEN),
        "down_proj": (HIDDEN, WIDTH),
    }
    return {
        f"m.{expert}.{name}.{kind}": random(*(shape if kind == "weight" else shape[:1]), seed=seed)
        for expert in range(NUM_EXPERTS)
        for name, shape in shapes.items()
        for seed, kind in enumerate(("weight", "bias"), 10 * expert + len(name))
    }


def experts(*, weighs_input: bool, **more: Any) -> Experts:
    build = fake_build(path="m", **more)
    layer = Experts(
        build, NUM_EXPERTS, HIDDEN, WIDTH, rule=RouterRule(2), bias=True, weighs_input=weighs_input
    )
    load_layers([layer], weights())
    return layer


def engine_rows(every: Group, ranks: int, placement: Any) -> EngineRows:
    """The groups of a rank. every: the ranks of all engines. ranks: of an engine."""
    assert isinstance(every.collective, FakeCollective)
    place = every.rank % ranks
    meeting = every.collective.meeting.of("engines", range(place, every.size, ranks))
    number = every.rank // ranks
    engines = Group(number, every.size // ranks, FakeCollective(meeting, number))
    return EngineRows(replace(every, placement=placement), engines, "cpu")


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=3),
    st.integers(1, 2),
    st.sampled_from(["linear", "round_robin"]),
    st.sampled_from(["alone", "shared", "gated"]),
    st.booleans(),
)
def test_each_engine_gets_what_one_with_all_experts_computes(
    counts: list[int], ranks: int, placement: str, shared: str, weighs_input: bool
) -> None:
    """Engines without rows compute one of padding, unless none has rows."""
    alone = experts(weighs_input=weighs_input)

    def inputs(engine: int) -> list[Tensor]:
        count = max(1, counts[engine])
        widths = {"alone": [], "shared": [HIDDEN], "gated": [HIDDEN, 1]}[shared]
        sizes = enumerate([HIDDEN, NUM_EXPERTS, *widths])
        return [random(count, width, seed=10 * engine + place) for place, width in sizes]

    def run(every: Group) -> tuple[Tensor, tuple[bool, bool]] | None:
        rows = engine_rows(every, ranks, placement)
        layer = experts(weighs_input=weighs_input, engines=rows)
        engine = every.rank // ranks
        assert rows.agree(counts[engine], NO_WAVE) == (True, True)
        assert rows.size == max(counts)
        return layer(*inputs(engine)) if rows.size else None

    for rank, out in enumerate(on_ranks(len(counts) * ranks, run)):
        engine = rank // ranks
        if out is not None:
            assert len(out) == max(1, counts[engine])
            own = out[: counts[engine]]
            torch.testing.assert_close(own, alone(*inputs(engine))[: len(own)])


WAVES = st.tuples(st.booleans(), st.booleans(), st.integers(-1, 2))


@settings(deadline=None)
@given(st.lists(WAVES, min_size=2, max_size=4))
def test_what_engines_agree_on(waves: list[tuple[bool, bool, int]]) -> None:
    answers = on_ranks(
        len(waves), lambda group: EngineRows(group, group, "cpu").agree(0, waves[group.rank])
    )
    is_quiet = not any(works for works, _, _ in waves) and len({n for *_, n in waves}) == 1
    is_over = is_quiet and not any(waits for _, waits, _ in waves)
    assert answers == [(is_quiet, is_over)] * len(waves)


class FakeEngine:
    """An engine whose requests take some steps."""

    def __init__(self) -> None:
        self.lockstep = Lockstep()
        self.inbox: deque[int | None] = deque()
        self.steps_left = 0

    def receive(self) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            if message is None:
                self.lockstep.leave()
                self.steps_left = 0
                return
            self.lockstep.wake()
            self.steps_left += message


def take_step(engines: list[FakeEngine]) -> None:
    """A step of all engines, as `EngineRows.agree` decides about it."""
    said = [engine.lockstep.says(engine.steps_left > 0) for engine in engines]
    rows = [EngineRows(Group(0, 1), Group(0, len(said), Said(said)), "cpu") for _ in engines]
    for engine, each in zip(engines, rows, strict=True):
        is_quiet, is_over = each.agree(0, NO_WAVE)
        engine.steps_left = max(0, engine.steps_left - 1)
        engine.lockstep.end_step(
            StepOutput(
                step=0,
                rows=torch.empty(0).numpy(),
                token_ids=CSR.empty(),
                is_quiet=is_quiet,
                is_over=is_over,
            )
        )


class Said:
    """A collective whose members have said this."""

    def __init__(self, said: list[Any]) -> None:
        self.said = torch.tensor([[0, *each] for each in said], dtype=torch.int64)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.said.view(1, -1)


@given(st.integers(2, 4), st.data())
def test_engines_never_wait_for_one_that_sleeps(count: int, data: st.DataObject) -> None:
    """Messages come late, in the same order for all engines. An engine takes a step as soon as it
    can, and waits there for the others. At the end all are idle, or have left."""
    engines = [FakeEngine() for _ in range(count)]
    late: list[deque[int | None]] = [deque() for _ in engines]
    waiting: set[int] = set()

    def let(number: int) -> None:
        """Let an engine work until it waits for others or for messages."""
        if number not in waiting:
            engines[number].receive()
            if engines[number].lockstep.is_running:
                waiting.add(number)
        if len(waiting) == count:
            waiting.clear()
            take_step(engines)

    for _ in range(data.draw(st.integers(0, 30))):
        what = data.draw(st.sampled_from(["request", "deliver", "let"]))
        number = data.draw(st.integers(0, count - 1))
        if what == "request":
            steps = data.draw(st.integers(0, 4))
            for engine, queue in enumerate(late):
                queue.append(steps if engine == number else 0)
        elif what == "deliver" and late[number]:
            engines[number].inbox.append(late[number].popleft())
        elif what == "let":
            let(number)
    if data.draw(st.booleans()):
        for queue in late:
            queue.append(None)
    for queue, engine in zip(late, engines, strict=True):
        engine.inbox.extend(queue)
    for _ in range(200):
        for number in range(count):
            let(number)
    assert not waiting
    assert not any(engine.lockstep.is_running or engine.steps_left for engine in engines)


def test_an_engine_with_all_experts_says_nothing() -> None:
    lockstep = Alone()
    lockstep.wake()
    assert not lockstep.is_running and lockstep.is_quiet and lockstep.says(True) is None


ON: dict[str, Any] = {"enable_expert_parallel": True, "data_parallel_size": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**ON, "data_parallel_rank": 1}, "belong to one server; remove enable_expert_parallel"),
        ({**ON, "data_parallel_start_rank": 1, "data_parallel_size_local": 1}, "to one server"),
        ({**ON, "pipeline_parallel_size": 2}, "pipeline_parallel_size cannot be used"),
        ({**ON, "prefill_context_parallel_size": 2}, "prefill_context_parallel_size cannot"),
        (
            {**ON, "decode_context_parallel_size": 2, "tensor_parallel_size": 2},
            "decode_context_parallel_size cannot",
        ),
        ({**ON, "enable_eplb": True, "tensor_parallel_size": 2}, "enable_eplb cannot"),
        ({**ON, "spec_method": "ngram", "spec_tokens": 2}, "spec_method cannot"),
        ({**ON, "max_loras": 1}, "max_loras cannot"),
        ({**ON, "enable_sleep_mode": True}, "enable_sleep_mode cannot"),
        ({**ON, "kv_connectors": ["offload"]}, "kv_connectors cannot"),
        ({**ON, "calculate_kv_scales": True}, "calculate_kv_scales cannot"),
        ({"all2all_backend": "naive"}, "all2all_backend needs enable_expert_parallel"),
        *(
            ({**ON, "all2all_backend": name}, f"{name}.*get all tokens")
            for name in ("pplx", "deepep_high_throughput", "deepep_low_latency")
        ),
        ({**ON, "all2all_backend": "flashinfer_all2allv"}, "allgather_reducescatter or naive"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config = EngineConfig(**values)
        check_engine(config)
        check_expert_engines(config)


@pytest.mark.parametrize("backend", ["naive", "allgather_reducescatter"])
def test_both_backends_are_one_exchange(backend: str) -> None:
    config = EngineConfig(**ON, all2all_backend=backend)
    check_engine(config)
    check_expert_engines(config)
    assert config.expert_engines == 2
    assert EngineConfig(data_parallel_size=2).expert_engines == 1


def test_ranks_on_several_hosts_are_refused() -> None:
    place = Place(rank=0, ranks=4, local_rank=0, local_ranks=2)
    nothing: Any = None
    with pytest.raises(ConfigError, match="must be on one host"):
        join_engines(nothing, EngineConfig(**ON), place, "", nothing, "")

"""The Engine: refused requests, the end of completions, metrics, control actions, and its death."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.config.limits import Limits
from pegboard.data.pooling_params import PoolingParams
from pegboard.data.request import EngineRequest, LoRARequest, RequestDelta
from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.engine.actions import ResetPrefixCache, StartProfile, Stats, StopProfile
from pegboard.engine.checks import check_request
from pegboard.engine.requests import Request
from pegboard.errors import ConfigError, EngineDeadError, Overloaded, PluginFailure, RequestError
from pegboard.interfaces.metrics import Metric, Sample, split_series
from pegboard.interfaces.scheduling_policy import SchedulingPolicySetup, StepBudget, StepLoad
from pegboard_testing.fake_engine import EOS, FakeEngine
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.fake_policy import FakePolicy


def greedy(max_tokens: int | None = 4, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "prompt is empty"),
        ([3] * 64, {}, "the prompt has 64 tokens, and the maximum model length is 64 tokens"),
        ([3, 64], {}, "token id 64 is out of vocabulary: ids go from 0 to 63"),
        ([3, -1], {}, "token id -1 is out of vocabulary"),
        ([3], {"priority": 1}, "scheduling policy that honours it"),
        ([3], {"lora": LoRARequest("poet", 1, "/p")}, "'poet': LoRA is off"),
        (
            [3],
            {"params": greedy(structured_outputs=StructuredOutputsParams(regex="a"))},
            "needs a structured output plugin",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    prompt: list[int], fields: dict[str, Any], message: str
) -> None:
    engine = FakeEngine()
    with pytest.raises(RequestError, match=message):
        engine.add("a", prompt, **fields)
    assert not engine.engine.has_work
    engine.generate([3], greedy())  # no state of the request is left


@given(st.booleans(), st.booleans(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 8))
def test_the_longest_prompt_and_the_highest_id(
    pools: bool, chunked: bool, vocab: int, length: int, budget: int
) -> None:
    """A completion needs room for one token."""
    limits = fake_limits(
        vocab_size=vocab,
        max_model_len=length + (not pools),
        max_num_seqs=1,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
    )
    highest = vocab - 1

    def is_taken(prompt: list[int]) -> bool:
        pooling = PoolingParams() if pools else None
        request = EngineRequest(
            request_id="a", prompt_token_ids=prompt, params=SamplingParams(), pooling=pooling
        )
        try:
            check_request(request, limits, has_priority=False, embedding_size=0)
        except RequestError as error:
            assert error.parameter == "prompt"
            return False
        return True

    assert (
        is_taken([highest])
        and is_taken([0])
        and not is_taken([highest + 1])
        and not is_taken([-1, 0][:length])
    )
    longest = length if chunked else min(length, budget)
    assert is_taken([0] * longest) and not is_taken([0] * (longest + 1)) and not is_taken([])


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = FakeEngine()
    engine.add("a", [3], greedy())
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add("a", [3], greedy())
    engine.run()
    engine.results.clear()
    engine.add("a", [3], greedy())


def test_a_full_queue_is_overloaded() -> None:
    engine = FakeEngine(max_num_queued_reqs=2, max_num_seqs=1)
    engine.add("a", [3], greedy())
    engine.step()
    engine.add("b", [3], greedy())
    engine.add("c", [3], greedy())
    with pytest.raises(Overloaded, match="2 completions are waiting"):
        engine.add("d", [3], greedy())


def test_every_completion_counts_in_the_queue() -> None:
    engine = FakeEngine(max_num_queued_reqs=4, max_num_seqs=1)
    engine.add("a", [3], SamplingParams(n=3))
    with pytest.raises(Overloaded, match="3 completions are waiting, the limit is 4"):
        engine.add("b", [3], SamplingParams(n=2))
    engine.add("c", [3], greedy())
    with pytest.raises(RequestError, match="n must be at most 4") as caught:
        engine.add("d", [3], SamplingParams(n=5))
    assert caught.value.parameter == "n" and not isinstance(caught.value, Overloaded), (
        "trying again would not help"
    )


def test_a_prompt_over_the_step_is_refused_without_chunked_prefill() -> None:
    engine = FakeEngine(enable_chunked_prefill=False, max_num_batched_tokens=8)
    with pytest.raises(RequestError, match="max_num_batched_tokens=8"):
        engine.add("a", range(9))


def test_a_longest_prompt_still_gets_one_token() -> None:
    result = FakeEngine(max_model_len=16).generate(range(15), greedy(None))
    assert len(result.token_ids) == 1 and result.finish_reason == "length"


@pytest.mark.parametrize(
    "name", ["max_model_len", "max_num_batched_tokens", "max_num_seqs", "vocab_size", "block_size"]
)
def test_limits_name_what_is_wrong(name: str) -> None:
    good = {
        "max_model_len": 8,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 2,
        "vocab_size": 9,
        "block_size": 4,
    }
    with pytest.raises(ConfigError, match=name):
        Limits(**{**good, name: 0})


def test_limits_that_contradict() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4 is below max_num_seqs=5"):
        fake_limits(max_num_batched_tokens=4, max_num_seqs=5)


# --- how a completion ends ------------------------------------------------------------------------


def end(
    params: SamplingParams, outputs: list[int], max_model_len: int = 100
) -> tuple[int, str | None, int | str | None]:
    request = Request.of(EngineRequest(request_id="r", prompt_token_ids=[5, 6], params=params))
    kept, reason = request.append_until_stop(outputs, max_model_len)
    assert request.output_token_ids == kept == outputs[: len(kept)] and request.all_token_ids == [
        5,
        6,
        *kept,
    ]
    return len(kept), reason, request.stop_reason


def test_the_order_of_ends() -> None:
    eos = {"eos_token_ids": [EOS], "stop_token_ids": [7], "max_tokens": 9}
    assert end(greedy(**eos), [3, EOS, 4]) == (2, "stop", None)
    assert end(greedy(**eos), [3, 7, 4]) == (2, "stop", 7)
    assert end(greedy(**eos, ignore_eos=True), [3, EOS, 4]) == (3, None, None)
    assert end(greedy(eos_token_ids=[EOS], stop_token_ids=[EOS], max_tokens=9), [EOS]) == (
        1,
        "stop",
        None,
    )
    assert end(
        greedy(eos_token_ids=[EOS], stop_token_ids=[EOS], max_tokens=9, ignore_eos=True), [EOS]
    ) == (1, "stop", EOS)
    assert end(greedy(**{**eos, "max_tokens": 2}), [3, EOS]) == (2, "stop", None), (
        "a stop token in the last place is a stop"
    )
    assert end(greedy(2), [3, 4, 5]) == (2, "length", None)
    assert end(greedy(None), [3, 4, 5], max_model_len=4) == (2, "length", None)


def test_min_tokens_holds_stops_back_but_never_the_model_length() -> None:
    eos = {"eos_token_ids": [EOS], "max_tokens": 9}
    assert end(greedy(**eos, min_tokens=2), [EOS, EOS, 5]) == (2, "stop", None)
    assert end(greedy(**eos, min_tokens=5), [EOS, EOS, EOS], max_model_len=4) == (2, "length", None)


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(0, 4),
    st.integers(4, 9),
    st.data(),
)
def test_tokens_in_one_go_end_like_tokens_one_by_one(
    outputs: list[int], min_tokens: int, max_tokens: int, data: Any
) -> None:
    params = greedy(
        max_tokens,
        min_tokens=min_tokens,
        eos_token_ids=[EOS],
        stop_token_ids=data.draw(st.sampled_from([[], [2]])),
    )
    one_by_one = Request.of(EngineRequest(request_id="r", prompt_token_ids=[5], params=params))
    for token in outputs:
        if one_by_one.append_until_stop([token], 100)[1]:
            break
    assert end(params, outputs)[0] == one_by_one.num_output_tokens


def test_abort_in_every_state() -> None:
    engine = FakeEngine(max_num_seqs=1, max_in_flight=2)
    engine.add("running", range(5), greedy(20))
    engine.add("waiting", range(5), greedy(20))
    engine.step()
    engine.engine.abort(["running", "waiting", "unknown"])
    results = engine.run()
    assert {name: results[name, 0].finish_reason for name in ("running", "waiting")} == {
        "running": "abort",
        "waiting": "abort",
    }
    assert results["waiting", 0].token_ids == []
    engine.check_idle()
    assert engine.engine.step() == []


def test_logprobs_come_with_their_tokens() -> None:
    result = FakeEngine(max_drafts=3).generate(range(5), greedy(9, logprobs=2))
    for delta in result.deltas:
        assert (
            delta.logprobs is not None
            and [p.token_ids[0] for p in delta.logprobs] == delta.token_ids
        )
        assert all(len(p.token_ids) == len(p.values) == 3 and p.rank == 1 for p in delta.logprobs)


# --- metrics --------------------------------------------------------------------------------------


class Sink:
    """Keeps every sample. fails_at: the number of the `publish` call that raises."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.metrics: list[Metric] = []
        self.samples: list[Sample] = []
        self.is_closed = False
        self._fails_at = fails_at

    def declare(self, metrics: Any) -> None:
        self.metrics.extend(metrics)

    def publish(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) == self._fails_at:
            raise OSError("disk full")

    def close(self) -> None:
        self.is_closed = True

    def total(self, name: str) -> float:
        return sum(sample.counters.get(name, 0) for sample in self.samples)

    def seen(self, name: str) -> list[float]:
        return [value for sample in self.samples for value in sample.observations.get(name, ())]


def test_what_is_measured() -> None:
    sink = Sink()
    now = [100.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    engine = FakeEngine(metrics=[sink], parts={"clock": clock}, block_size=4)
    engine.add("a", range(10), greedy(3))
    engine.run()
    engine.add("b", range(10), greedy(3))
    engine.run()
    assert sink.total("prompt_tokens_total") == 20 and sink.total("generation_tokens_total") == 6
    assert (
        sink.total("prefix_cache_queries_total") == 20
        and sink.total("prefix_cache_hits_total") == 8
    )
    assert sink.total("request_success_total|length") == 2
    assert (
        len(sink.seen("time_to_first_token_seconds")) == 2
        and len(sink.seen("inter_token_latency_seconds")) == 4
    )
    assert all(
        value > 0
        for value in sink.seen("time_to_first_token_seconds")
        + sink.seen("e2e_request_latency_seconds")
    )
    assert sink.seen("request_prompt_tokens") == [10, 10] and sink.seen(
        "request_generation_tokens"
    ) == [3, 3]
    assert len(sink.samples) == len(engine.executor.batches), "one sample per step"
    assert max(sample.gauges["num_requests_running"] for sample in sink.samples) == 1
    declared = {metric.name: metric for metric in sink.metrics}
    for sample in sink.samples:
        published = {
            "gauge": sample.gauges,
            "counter": sample.counters,
            "histogram": sample.observations,
        }
        for kind, keys in published.items():
            for name, labels in map(split_series, keys):
                assert declared[name].type == kind and len(declared[name].labels) == len(labels)
    engine.engine.stop()
    assert sink.is_closed


def test_a_failing_sink_is_switched_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    bad = Sink(fails_at=2)
    good = Sink()
    engine = FakeEngine(metrics=[bad, good])
    with caplog.at_level(logging.WARNING, "pegboard"):
        engine.generate(range(5), greedy(6))
    assert len(bad.samples) == 2 and len(good.samples) == 6
    assert len([record for record in caplog.records if "Sink" in record.getMessage()]) == 1


# --- control --------------------------------------------------------------------------------------


def test_reset_prefix_cache() -> None:
    engine = FakeEngine(block_size=4)
    tokens = engine.generate(range(10), greedy(8)).token_ids
    assert engine.ask(ResetPrefixCache())
    engine.add("a", range(10), greedy(8))
    engine.step()
    engine.step()
    assert not engine.ask(ResetPrefixCache())
    assert engine.ask(ResetPrefixCache(reset_running_requests=True))
    assert engine.run()["a", 0].token_ids == tokens
    assert engine.results["a", 0].deltas[0].num_cached_tokens == 0


def test_the_rest_of_the_side_door() -> None:
    engine = FakeEngine(block_size=4)
    engine.add("a", range(10), greedy(8))
    engine.step()
    stats = engine.ask(Stats())
    assert (
        stats["blocks_of"] == {"a": [3]} and stats["num_free_blocks"] == stats["num_blocks"] - 1 - 3
    )
    engine.ask(StartProfile("/tmp/x"))
    assert engine.executor.calls[-1] == ("profile", ("/tmp/x",))
    engine.ask(StopProfile())
    assert engine.executor.calls[-1] == ("profile", (None,))
    assert engine.ask(Stats()) == engine.engine.stats()


# --- death ----------------------------------------------------------------------------------------


def test_a_failed_step_is_the_end() -> None:
    engine = FakeEngine(failing_step=1)
    engine.add("a", range(5), greedy(8))
    engine.step()
    with pytest.raises(
        EngineDeadError, match="a step failed: RuntimeError: asked to fail"
    ) as error:
        engine.step()
    assert isinstance(error.value.__cause__, RuntimeError)
    inner = engine.engine
    calls = [
        engine.step,
        lambda: engine.add("b", [3]),
        lambda: inner.abort(["a"]),
        lambda: inner.control(Stats()),
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match="asked to fail"):
            call()
    engine.engine.stop()
    assert engine.executor.is_stopped
    with pytest.raises(EngineDeadError, match="asked to fail"):
        engine.add("b", [3])


def test_a_stopped_engine_takes_no_requests() -> None:
    engine = FakeEngine()
    engine.engine.stop()
    engine.engine.stop()
    for call in (engine.step, lambda: engine.add("a", [3]), lambda: engine.ask(Stats())):
        with pytest.raises(EngineDeadError, match="it was stopped"):
            call()


def test_a_failing_policy_is_named() -> None:
    class Broken(FakePolicy):
        def budget(self, load: StepLoad) -> StepBudget:
            raise KeyError("oops")

    engine = FakeEngine(policy=Broken(SchedulingPolicySetup(fake_limits())))
    engine.add("a", [3])
    with pytest.raises(PluginFailure, match="scheduling_policy Broken failed: KeyError"):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()


@pytest.mark.parametrize(
    ("method", "value"), [("budget", None), ("budget", 3), ("victim", "the first")]
)
def test_a_policy_that_returns_something_else_is_named(method: str, value: object) -> None:
    policy = FakePolicy(SchedulingPolicySetup(fake_limits()))
    setattr(policy, method, lambda *_: value)
    engine = FakeEngine(policy=policy, num_blocks=18)
    for name in "abc":
        engine.add(name, range(9), greedy(40))
    with pytest.raises(
        PluginFailure,
        match=rf"scheduling_policy FakePolicy failed: FakePolicy.{method}\(\) returned a",
    ):
        engine.run()


@pytest.mark.parametrize("token", [-1, -5, 64, 10**6])
def test_a_token_that_does_not_exist_ends_only_its_request(token: int) -> None:
    """The worker reports NaN logits as -1. The other request of the step goes on."""
    good = FakeEngine().generate(range(5), greedy(6)).token_ids
    engine = FakeEngine()
    engine.add("bad", range(7), greedy(6))
    engine.add("good", range(5), greedy(6))
    engine.step()
    run = engine.worker.run

    def broken(*arguments: Any) -> Any:
        result = run(*arguments)

        def wait() -> Any:
            output = result()
            output.token_ids.flat[0] = token
            return output

        return wait

    engine.worker.run = broken
    engine.step()
    engine.worker.run = run
    engine.run()
    bad = engine.results["bad", 0]
    assert bad.finish_reason == "error" and str(token) in (bad.deltas[-1].error or "")
    assert engine.results["good", 0].token_ids == good
    engine.check_idle()


def test_the_policy_learns_from_every_step() -> None:
    policy = FakePolicy(SchedulingPolicySetup(fake_limits(max_num_batched_tokens=32)))
    engine = FakeEngine(policy=policy)
    engine.add("a", range(5), greedy(4))
    engine.add("b", range(5), greedy(4))
    engine.run()
    assert len(policy.loads) == len(engine.executor.batches)
    assert [load.num_decodes for load in policy.loads] == [0, 2, 2, 2] and policy.loads[
        0
    ].num_waiting == 2


def test_a_dead_worker_is_noticed_between_steps() -> None:
    engine = FakeEngine()
    engine.executor.die("killed")
    with pytest.raises(EngineDeadError, match="FakeExecutor reports that worker 0 died: killed"):
        engine.add("a", [3])
    assert engine.engine.has_work, "the loop steps, so that the death is told"
    with pytest.raises(EngineDeadError, match="worker 0 died: killed"):
        engine.engine.step()


def test_batches_share_no_state_with_the_engine() -> None:
    """A batch may be computed much later, so the engine must not change it in the meantime."""
    engine = FakeEngine(max_in_flight=2)
    engine.add("a", range(9), greedy(9))
    engine.step()
    batch = engine.executor.batches[0]
    before = [
        array.copy()
        for array in (
            batch.new[0].token_ids,
            *batch.new[0].block_ids,
            batch.rows,
            batch.num_computed_tokens,
        )
    ]
    engine.run()
    after = [batch.new[0].token_ids, *batch.new[0].block_ids, batch.rows, batch.num_computed_tokens]
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def test_deltas_are_plain_data() -> None:
    import msgspec

    deltas = FakeEngine(max_drafts=2).generate(range(5), greedy(6, logprobs=1)).deltas
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(deltas), type=list[RequestDelta]) == deltas

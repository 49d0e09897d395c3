"""The engine's metrics: every number agrees with the deltas of the engine, on random loads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.data.request import LoRARequest
from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.engine.actions import Sleep, WakeUp
from pegboard.engine.metrics.catalogue import engine_metrics, token_buckets
from pegboard.engine.metrics.step import StepMetrics
from pegboard.interfaces.metrics import Reading, RequestRecord, Sample, Totals
from pegboard_testing.fake_engine import FakeEngine
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.fake_structured_output import FakeStructuredOutput

NAMES = {
    kind: f"my_{kind}"
    for kind in ("attention", "model", "sampler", "draft", "structured_output", "kv_connector")
}


class Records(Totals):
    """Adds up all samples and keeps every record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[RequestRecord] = []

    def publish(self, sample: Sample) -> None:
        super().publish(sample)
        self.records.extend(sample.requests)

    def get(self, name: str, *labels: str) -> Reading:
        return next(
            r
            for metric, found in self.readings()
            if metric.name == name
            for r in found
            if r.labels == labels
        )

    def value(self, name: str, *labels: str) -> float:
        return self.get(name, *labels).value


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.125
        return self.now_s


def measured_engine(
    show_hidden: str | None = None, parts: dict[str, Any] | None = None, **more: Any
) -> tuple[FakeEngine, Records]:
    sink = Records()
    measured = {"plugin_names": NAMES, "wants_records": True, "show_hidden": show_hidden}
    parts = {"clock": Clock(), **(parts or {})}
    settings = {"block_size": 4, "measured": measured, **more}
    return FakeEngine(metrics=[sink], parts=parts, **settings), sink


requests = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.integers(1, 12),
        st.sampled_from([1, 1, 1, 3]),
        st.integers(0, 20),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


@given(load=requests, spare_blocks=st.sampled_from([0, 3, 40]), max_drafts=st.sampled_from([0, 3]))
@settings(max_examples=40, deadline=None)
def test_sums_agree_with_what_came_out(
    load: list[tuple[int, int, int, int, bool]], spare_blocks: int, max_drafts: int
) -> None:
    """The sums agree even if requests are preempted, cached, drafted or aborted."""
    engine, sink = measured_engine(spare_blocks=spare_blocks, max_drafts=max_drafts)
    expected_n = {}
    for index, (length, max_tokens, n, _, _) in enumerate(load):
        params = SamplingParams(
            temperature=0.0 if n == 1 else 1.0, seed=0, max_tokens=max_tokens, n=n, ignore_eos=True
        )
        engine.add(f"r{index}", [token % 40 + 2 for token in range(length)], params)
        expected_n[f"r{index}"] = n
    for step in range(21):
        ended = [
            f"r{index}" for index, request in enumerate(load) if request[4] and request[3] == step
        ]
        engine.engine.abort(ended)
        engine.step()
    results = engine.run()
    engine.check_idle()

    reasons = Counter(result.finish_reason for result in results.values())
    for reason in ("stop", "length", "abort", "error"):
        assert sink.value("request_success_total", reason) == reasons[reason]
    assert sink.value("generation_tokens_total") == sum(
        len(result.token_ids) for result in results.values()
    )
    started = [key for key, result in results.items() if result.token_ids]
    assert sink.value("prompt_tokens_total") == sum(load[int(name[1:])][0] for name, _ in started)
    by_source = [
        sink.value("prompt_tokens_by_source_total", source)
        for source in ("local_compute", "local_cache_hit")
    ]
    assert sum(by_source) == sink.value("prompt_tokens_total") and by_source[1] == sink.value(
        "prompt_tokens_cached_total"
    )
    assert sink.value("prefix_cache_hits_total") <= sink.value("prefix_cache_queries_total")
    assert sink.get("time_to_first_token_seconds").count == len(started)
    assert (
        sink.get("e2e_request_latency_seconds").count
        == sink.get("request_prompt_tokens").count
        == len(results)
    )
    assert sink.value("request_generation_tokens") == sink.value("generation_tokens_total")
    assert sink.get("request_decode_time_seconds").count == len(started)
    assert sink.value("request_num_preemptions") == sink.value("num_preemptions_total")
    parts = sink.value("request_prefill_time_seconds") + sink.value("request_decode_time_seconds")
    assert parts == pytest.approx(sink.value("request_inference_time_seconds"))
    assert sink.get("iteration_tokens_total").count == len(engine.executor.batches)
    assert (
        sink.value("num_requests_running")
        == sink.value("num_requests_waiting")
        == sink.value("kv_cache_usage_perc")
        == 0
    )
    check_requests(sink, engine, expected_n)
    if max_drafts:
        check_drafts(sink, max_drafts)


def check_requests(sink: Records, engine: FakeEngine, expected_n: dict[str, int]) -> None:
    assert {record.request_id: record.n for record in sink.records} == expected_n, (
        "one record per request"
    )
    assert sink.get("request_params_n").count == len(expected_n) and sink.value(
        "request_params_n"
    ) == sum(expected_n.values())
    longest = {}
    for (name, _), result in engine.results.items():
        longest[name] = max(longest.get(name, 0), len(result.token_ids))
    assert sink.value("request_max_num_generation_tokens") == sum(longest.values())
    for record in sink.records:
        own = [result for (name, _), result in engine.results.items() if name == record.request_id]
        assert record.num_generated_tokens == sum(len(result.token_ids) for result in own)
        assert sorted(record.finish_reasons) == sorted(str(result.finish_reason) for result in own)
        times = [
            record.arrival_s,
            record.first_scheduled_s,
            record.first_token_s,
            record.last_token_s,
            record.finished_s,
        ]
        came = [time_s for time_s in times if time_s]
        assert came == sorted(came)
        assert 0 <= record.forward_s <= record.execute_s


def check_drafts(sink: Records, max_drafts: int) -> None:
    accepted = sink.value("spec_decode_num_accepted_tokens_total")
    by_position = [
        sink.value("spec_decode_num_accepted_tokens_per_pos_total", str(place))
        for place in range(max_drafts)
    ]
    assert sum(by_position) == accepted <= sink.value("spec_decode_num_draft_tokens_total")
    assert by_position == sorted(by_position, reverse=True), (
        "a draft token counts only if all before it do"
    )
    assert by_position[0] <= sink.value("spec_decode_num_drafts_total")


def test_times_of_one_request() -> None:
    engine, sink = measured_engine()
    engine.add(
        "a",
        [2, 3, 4],
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
        arrival_s=990.0,
    )
    engine.run()
    (record,) = sink.records
    assert sink.value("time_to_first_token_seconds") == record.first_token_s - 990.0
    assert sink.value("e2e_request_latency_seconds") == record.finished_s - 990.0
    assert sink.value("request_queue_time_seconds") == record.first_scheduled_s - 990.0
    assert sink.value("request_decode_time_seconds") == record.last_token_s - record.first_token_s
    assert sink.value("inter_token_latency_seconds") == pytest.approx(
        record.last_token_s - record.first_token_s
    )
    assert (
        sink.value("request_time_per_output_token_seconds")
        == (record.last_token_s - record.first_token_s) / 3
    )
    assert sink.value("request_params_max_tokens") == record.max_tokens == 4


def test_a_stop_string_found_outside_counts_as_stop() -> None:
    engine, sink = measured_engine()
    engine.add("a", [2, 3, 4], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    engine.step()
    engine.engine.abort(["a"], "stop")
    engine.run()
    assert (
        sink.value("request_success_total", "stop") == 1
        and sink.value("request_success_total", "abort") == 0
    )


def test_plugins_cost_time() -> None:
    grammars = FakeStructuredOutput(64, [1])
    engine, sink = measured_engine(structured_output=grammars)
    structured = StructuredOutputsParams(grammar="3:0,1,2:7")
    engine.add(
        "a",
        [2, 3, 4],
        SamplingParams(
            temperature=0.0, max_tokens=20, eos_token_ids=[1], structured_outputs=structured
        ),
    )
    engine.run()
    assert sink.value("pegboard_plugin_seconds_total", "model", "my_model", "forward") > 0
    assert (
        sink.value(
            "pegboard_plugin_seconds_total", "structured_output", "my_structured_output", "masks"
        )
        > 0
    )
    for part in ("schedule", "execute", "apply"):
        assert sink.value("pegboard_step_seconds_total", part) > 0


def test_adapters_in_use(tmp_path: Path) -> None:
    sink = Records()
    engine = FakeEngine(metrics=[sink], max_loras=1, parts={"clock": Clock()})
    for number, name in enumerate(("sql", "poems"), 1):
        lora = LoRARequest(name, number, str(tmp_path))
        engine.add(
            name,
            [2, 3, 4],
            SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
            lora=lora,
        )
    engine.step()
    info = [
        reading
        for metric, found in sink.readings()
        if metric.name == "lora_requests_info"
        for reading in found
    ]
    assert [reading.labels for reading in info] == [("1", "poems", "sql")] and info[0].value > 1000
    engine.run()
    info = [
        reading
        for metric, found in sink.readings()
        if metric.name == "lora_requests_info"
        for reading in found
    ]
    assert [reading.labels for reading in info] == [("1", "", "")]


def test_a_sink_that_comes_late_learns_the_state() -> None:
    engine, sink = measured_engine()
    late = Records()
    engine.engine.attach(late)
    engine.generate([2, 3, 4], SamplingParams(max_tokens=2))
    for each in (sink, late):
        assert each.value("engine_sleep_state", "awake") == 1, "dashboards for vLLM read it"
        assert each.value("request_success_total", "length") == 1


def test_the_sleep_state_is_shown_while_no_step_runs() -> None:
    engine, sink = measured_engine(parts={"can_sleep": True})
    names = ("awake", "weights_offloaded", "discard_all")
    for level, states in ((0, [0, 0, 0]), (1, [0, 1, 0]), (2, [0, 0, 1])):
        engine.ask(Sleep(level=level))
        assert [sink.value("engine_sleep_state", name) for name in names] == states
        engine.ask(WakeUp())
        assert [sink.value("engine_sleep_state", name) for name in names] == [1, 0, 0]


def test_a_misspelled_metric_is_an_error() -> None:
    metrics = StepMetrics(fake_limits(), [Records()])
    metrics.count("generation_token_total")
    with pytest.raises(AssertionError, match="'generation_token_total' .* is not in the catalogue"):
        metrics.publish({})


def test_buckets_of_tokens_end_at_the_models_length() -> None:
    assert token_buckets(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert token_buckets(5) == (1, 2, 5) and token_buckets(4) == (1, 2)


@pytest.mark.parametrize(
    ("version", "is_shown"),
    [(None, False), ("0.11", True), ("0.12", True), ("0.12.1", True), ("0.13", False)],
)
def test_hidden_metrics(version: str | None, is_shown: bool) -> None:
    names = {metric.name for metric in engine_metrics(fake_limits(), show_hidden=version)}
    assert ("time_per_output_token_seconds" in names) is is_shown


def test_a_hidden_metric_repeats_the_new_one() -> None:
    engine, sink = measured_engine(show_hidden="0.12")
    engine.generate([2, 3, 4], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    old = sink.get("time_per_output_token_seconds")
    new = sink.get("inter_token_latency_seconds")
    assert (old.count, old.value, old.bucket_counts) == (
        new.count,
        new.value,
        new.bucket_counts,
    ) and new.count == 3

"""Random work for the engine: every request gets the same tokens as when it runs alone, and at the
end everything has been released."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pegboard.config.limits import NO_LIMIT
from pegboard.data.media import MediaItem
from pegboard.data.request import EngineRequest, LoRARequest
from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.engine.actions import ResetPrefixCache
from pegboard.interfaces.attention import Chunk, Encoder, Full, State, Window
from pegboard_testing.fake_connectors import FakeKV
from pegboard_testing.fake_draft import FakeDraft
from pegboard_testing.fake_engine import EOS, FakeEngine, expected_tokens, scored_prompt
from pegboard_testing.fake_structured_output import FakeGrammar, FakeStructuredOutput

VOCAB = 64
RANDOM = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
}
"""There is no shrinking, because a failing scenario is printed completely and can be replayed."""
ADAPTERS = [LoRARequest(f"adapter{i}", i, "/there") for i in (1, 2, 3)]
BAD_ADAPTER = LoRARequest("bad", 4, "/bad")
LAYERS = [
    [Full()],
    [Full(), Full(), Full()],
    [Window(5)],
    [Full(), Window(6), Window(6)],
    [Full(), Window(7, sinks=3)],
    [Full(), Chunk(8)],
    [Chunk(6), Window(4)],
    [State(checkpoint_every=8)],
    [Full(), State(checkpoint_every=8)],
    [Window(9), State()],
    [Full(), Encoder(5)],
    [Window(6), Encoder(3), Full(), Encoder(3)],
]

grammars = st.sampled_from(["3:0,1,2:4", "2:1:6", "4:0,3:3"])


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of a FakeEngine, so small that everything is scarce."""
    retains = draw(st.sampled_from(LAYERS))
    kinds = {type(retain) for retain in retains}
    max_num_seqs = draw(st.integers(1, 5))
    max_drafts = draw(st.sampled_from([0, 0, 1, 3]))
    kv_load = (
        draw(st.sampled_from([None, None, "in_step", "between_steps"]))
        if not kinds & {State, Encoder}
        else None
    )
    max_num_batched_tokens = max_num_seqs + draw(st.integers(0, 30))
    num_stages = draw(st.sampled_from([1, 1, 2, 3])) if Encoder not in kinds else 1
    return {
        "retains": retains,
        "slot_bytes": [draw(st.sampled_from([4, 4, 8])) for _ in retains],
        "block_size": draw(st.sampled_from([1, 2, 4])),
        "spare_blocks": draw(st.integers(0, 20)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": draw(st.sampled_from([16, 33, 48])),
        "max_in_flight": max(num_stages, draw(st.sampled_from([1, 1, 2, 3]))),
        "num_stages": num_stages,
        "enable_prefix_caching": (draw(st.booleans()) and Encoder not in kinds)
        or kv_load is not None,
        "enable_chunked_prefill": draw(st.sampled_from([True, True, False])),
        "max_drafts": max_drafts,
        "max_draft_rows": draw(st.sampled_from([NO_LIMIT, NO_LIMIT, 2])),
        "max_draft_len": draw(st.sampled_from([NO_LIMIT, NO_LIMIT, 9])),
        "drafts_ahead": max_drafts > 0
        and num_stages == 1
        and State not in kinds
        and draw(st.booleans()),
        "draft": partial(FakeDraft, accuracy=draw(st.sampled_from([0.3, 0.8, 1.0]))),
        "max_loras": draw(st.sampled_from([1, 2])),
        "max_cpu_loras": draw(st.sampled_from([2, 3])),
        "by_priority": draw(st.booleans()),
        "kv": kv_load and FakeKV(kv_load),
        "long_prefill_token_threshold": draw(st.sampled_from([NO_LIMIT, NO_LIMIT, 3, 9])),
        "max_num_partial_prefills": draw(st.integers(1, 3)),
        "max_num_encoder_input_tokens": draw(st.sampled_from([1, 4, 9])),
        "encoder_cache_size": draw(st.sampled_from([1, 5, 9])),
        "disable_chunked_mm_input": draw(st.sampled_from([False, False, True])),
        "whole": draw(st.sampled_from([None, None, "items", "prompt"])),
    }


@st.composite
def items(draw: st.DrawFn, prompt: list[int]) -> tuple[MediaItem, ...]:
    """Draw images of a few rows, some of them with other tokens in between, and write their tokens
    into the prompt."""
    media: list[MediaItem] = []
    place = draw(st.integers(0, 4))
    for name in draw(st.lists(st.sampled_from("abcd"), max_size=3)):
        runs = {"a": [1], "b": [3], "c": [2, 2], "d": [6]}[name]
        places = []
        for count in runs:
            places.append((place, count))
            place += count + 1
        if place > len(prompt):
            break
        for start, count in places:
            prompt[start : start + count] = [5] * count
        media.append(MediaItem("image", name, tuple(places), {}))
        place += draw(st.integers(0, 5))
    return tuple(media)


@st.composite
def requests(draw: st.DrawFn, max_model_len: int) -> EngineRequest:
    """Draw a request whose prompt shares prefixes with others."""
    stem = [(7 * i + 3) % VOCAB for i in range(draw(st.integers(0, max_model_len - 2)))]
    tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
    prompt = (stem + tail)[: max_model_len - 1]
    greedy = draw(st.booleans())
    grammar = draw(st.one_of(st.none(), st.none(), grammars))
    params = SamplingParams(
        temperature=0.0 if greedy else 1.0,
        seed=None if greedy else draw(st.integers(0, 3)),
        n=1 if greedy else draw(st.integers(1, 3)),
        max_tokens=draw(st.sampled_from([1, 2, 7, 20, None])),
        eos_token_ids=[EOS],
        ignore_eos=draw(st.booleans()) and grammar is None,
        stop_token_ids=draw(st.sampled_from([[], [2, 9]])) if grammar is None else [],
        logprobs=draw(st.sampled_from([None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        structured_outputs=StructuredOutputsParams(grammar=grammar) if grammar else None,
    )
    params.min_tokens = (
        draw(st.integers(0, min(3, params.max_tokens or 3))) if grammar is None else 0
    )
    return EngineRequest(
        request_id="",
        prompt_token_ids=prompt,
        params=params,
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from([None, None, "salt"])),
        lora=draw(st.sampled_from([None, None, None, None, *ADAPTERS, *ADAPTERS, BAD_ADAPTER])),
        media=draw(items(prompt)) if draw(st.booleans()) else (),
    )


@st.composite
def scenarios(
    draw: st.DrawFn,
) -> tuple[dict[str, Any], list[tuple[int, EngineRequest]], dict[str, int], set[int]]:
    """Draw (arguments of the engine, [(step of arrival, request)], request id → step of abort,
    numbers of the KV loads that fail)."""
    engine = draw(engines())
    if engine["max_drafts"]:
        engine["retains"] = [
            State(retain.checkpoint_every, takes_drafts=True)
            if isinstance(retain, State)
            else retain
            for retain in engine["retains"]
        ]
    arrivals = []
    for number in range(draw(st.integers(3, 8))):
        request = draw(requests(engine["max_model_len"]))
        request.request_id = f"r{number}"
        if rows := [retain.tokens for retain in engine["retains"] if isinstance(retain, Encoder)]:
            count = draw(st.integers(1, rows[0]))
            item = MediaItem("audio", f"{draw(st.integers(0, 3))}-{count}", ((0, 1),), {}, count)
            request.media = (item,)
        request.priority *= engine["by_priority"]
        if len(request.prompt_token_ids) > engine["max_num_batched_tokens"] and not (
            engine["enable_chunked_prefill"] and engine["whole"] != "prompt"
        ):
            del request.prompt_token_ids[engine["max_num_batched_tokens"] :]
            length = len(request.prompt_token_ids)
            request.media = tuple(item for item in request.media if item.stop <= length)
        request.media = _possible(request.media, engine)
        arrivals.append((draw(st.sampled_from([0, 0, 1, 5, 12])), request))
    aborts = {
        r.request_id: step + draw(st.integers(0, 8))
        for step, r in arrivals
        if draw(st.integers(0, 5)) == 0
    }
    return engine, arrivals, aborts, draw(st.sets(st.integers(0, 6), max_size=3))


def _possible(media: tuple[MediaItem, ...], engine: dict[str, Any]) -> tuple[MediaItem, ...]:
    """Return the items that the engine does not refuse."""
    most = engine["max_num_batched_tokens"]
    if engine["whole"] == "items":
        return tuple(item for item in media if all(count <= most for _, count in item.places))
    room = min(engine["max_num_encoder_input_tokens"], engine["encoder_cache_size"])
    rows = sum({item.digest: item.num_rows for item in media}.values())
    return media[:1] if engine["whole"] == "prompt" and rows > room else media


def _expected(engine: FakeEngine, request: EngineRequest, index: int) -> tuple[list[int], str]:
    allowed = None
    wanted = request.params.structured_outputs
    if wanted is not None:
        modulus, residues, length = wanted.grammar.split(":")

        def allowed(outputs: list[int]) -> list[int]:
            grammar = FakeGrammar(
                int(modulus), tuple(map(int, residues.split(","))), int(length), frozenset({EOS})
            )
            assert grammar.accept(outputs) == len(outputs)
            return [token for token in range(VOCAB) if grammar.allows(token)]

    return expected_tokens(
        engine.model,
        request,
        index=index,
        max_model_len=engine.limits.max_model_len,
        allowed=allowed,
    )


def _run(
    engine: FakeEngine, arrivals: list[tuple[int, EngineRequest]], aborts: dict[str, int]
) -> None:
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    for step in range(3000):
        while pending and pending[0][0] <= step:
            engine.engine.add(pending.pop(0)[1])
        engine.engine.abort([request_id for request_id, at in aborts.items() if at == step])
        if not pending and not engine.engine.has_work:
            return
        engine.step()
    raise AssertionError(f"no end: {engine.engine.stats()} {list(engine.engine._live)}")


def _check_results(
    engine: FakeEngine, arrivals: list[tuple[int, EngineRequest]], aborts: dict[str, int]
) -> None:
    for _, request in arrivals:
        for index in range(request.params.n):
            result = engine.results[request.request_id, index]
            tokens, reason = _expected(engine, request, index)
            if result.finish_reason == "abort":
                assert request.request_id in aborts
                assert result.token_ids == tokens[: len(result.token_ids)]
                continue
            if request.lora is BAD_ADAPTER:
                assert (result.finish_reason, result.token_ids) == ("error", [])
                continue
            assert result.token_ids == tokens
            assert result.finish_reason == reason
            first = next(delta for delta in result.deltas if delta.token_ids)
            assert first.num_cached_tokens is not None
            if request.params.logprobs is not None:
                assert [p.token_ids[0] for d in result.deltas for p in d.logprobs or ()] == tokens
            if request.params.prompt_logprobs is not None and index == 0:
                assert scored_prompt(first) == request.prompt_token_ids[1:]


def _build(arguments: dict[str, Any], failing_loads: set[int], store: dict[Any, Any]) -> FakeEngine:
    seen: list[str] = []

    def fails(key: str) -> int | None:
        seen.append(key)
        return 3 if len(seen) in failing_loads else None

    kv = arguments["kv"] and replace(arguments["kv"], store=store, fails=fails)
    engine = FakeEngine(
        **{**arguments, "kv": kv},
        vocab_size=VOCAB,
        structured_output=FakeStructuredOutput(VOCAB, [EOS]),
    )
    engine.worker.bad_adapters.add(BAD_ADAPTER.lora_path)
    return engine


@settings(max_examples=250, **RANDOM)
@given(scenarios())
def test_every_request_gets_the_tokens_it_gets_alone(scenario: Any) -> None:
    arguments, arrivals, aborts, failing_loads = scenario
    store: dict[Any, Any] = {}
    # the second engine finds the KV that the first one stored
    for _ in range(2 if arguments["kv"] else 1):
        engine = _build(arguments, failing_loads, store)
        _run(engine, arrivals, aborts)
        _check_results(engine, arrivals, aborts)
        engine.check_idle()
        assert engine.ask(ResetPrefixCache())


def test_nothing_forks_from_a_prefix_that_is_still_being_loaded() -> None:
    """The test above found this case. A request was preempted, and the connector loaded its prompt
    again. In the step of the load, the request shared a block with its siblings before the block
    had any content."""
    arguments = {
        "retains": [Full(), Window(tokens=7, sinks=3)],
        "slot_bytes": [4, 4],
        "block_size": 2,
        "spare_blocks": 2,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 9,
        "max_model_len": 16,
        "max_in_flight": 3,
        "enable_prefix_caching": True,
        "max_drafts": 3,
        "enable_chunked_prefill": True,
        "draft": partial(FakeDraft, accuracy=0.3),
        "kv": FakeKV("in_step"),
    }
    store: dict[Any, Any] = {}
    for _ in range(2):
        grammar = StructuredOutputsParams(grammar="2:1:6")
        first = SamplingParams(
            n=2, seed=1, max_tokens=7, eos_token_ids=[EOS], structured_outputs=grammar
        )
        second = SamplingParams(
            n=3, seed=3, max_tokens=20, min_tokens=1, ignore_eos=True, eos_token_ids=[EOS]
        )
        arrivals = [
            (1, EngineRequest(request_id="r1", prompt_token_ids=[56, 27, 2, 51, 30], params=first)),
            (5, EngineRequest(request_id="r2", prompt_token_ids=[3, 31], params=second)),
        ]
        engine = _build(arguments, set(), store)
        _run(engine, arrivals, {})
        _check_results(engine, arrivals, {})


@settings(max_examples=20, **RANDOM)
@given(scenarios())
def test_same_work_same_steps(scenario: Any) -> None:
    """Nothing in the engine depends on object identity, hash seeds or time. Grammars are left out,
    because they compile in threads."""
    arguments, arrivals, aborts, failing_loads = scenario
    arrivals = [
        (step, request) for step, request in arrivals if request.params.structured_outputs is None
    ]
    runs = []
    for _ in range(2):
        engine = _build(arguments, failing_loads, {})
        _run(engine, arrivals, aborts)
        runs.append(
            [
                (b.rows.tolist(), b.num_scheduled_tokens.tolist(), b.new_blocks.block_ids.lists())
                for b in engine.executor.batches
            ]
        )
    assert runs[0] == runs[1]

"""LLM with an engine in the same process: order of outputs, errors before anything runs, chat, beam
search, Ctrl-C, and LLMEngine."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from pegboard.config.sources import engine_settings
from pegboard.data.output import Counter, Logprob
from pegboard.data.request import PositionLogprobs, RequestDelta
from pegboard.data.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from pegboard.errors import ConfigError, RequestError
from pegboard.front.beam_search import score
from pegboard.front.llm import LLM
from pegboard.front.llm_engine import LLMEngine
from pegboard.installed import Entry
from pegboard.plugins.discovery import Scan
from pegboard.plugins.registry import Registry
from pegboard_testing.echo_engine import REFUSED_PRIORITY, EchoEngine, echo_plan
from pegboard_testing.fake_client import ByteTokenizer


def make_llm(engine_class=EchoEngine, **settings) -> LLM:
    plan = echo_plan(**settings)
    return LLM.from_engine(LLMEngine(plan, ByteTokenizer(), engine_class(plan)))


def test_outputs_come_in_the_order_of_the_prompts():
    llm = make_llm()
    prompts = [[97 + number] for number in range(8)]
    params = [SamplingParams(max_tokens=8 - number) for number in range(8)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [
        chr(97 + number) * (8 - number) for number in range(8)
    ]
    assert all(output.finished for output in outputs)
    assert not llm.llm_engine.has_unfinished_requests()
    assert (
        llm.generate([97, 98], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].text
        == "ab"
    )
    assert llm.generate([], use_tqdm=False) == []


def test_one_prompt_default_params_and_stop():
    llm = make_llm()
    (output,) = llm.generate({"prompt_token_ids": list(b"abcd"), "prompt": "abcd"}, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16 and output.prompt == "abcd"
    (output,) = llm.generate(list(b"abcd"), SamplingParams(stop="cd"), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", "cd")
    assert llm.llm_engine.engine.aborted == [output.request_id]


def test_a_wrong_prompt_stops_everything_before_it_runs():
    llm = make_llm()
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[97], []], use_tqdm=False)
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate("a", [SamplingParams(), SamplingParams()], use_tqdm=False)
    with pytest.raises(RequestError, match="refused"):
        llm.generate(["a", "b"], priority=[0, REFUSED_PRIORITY], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests() and not llm.llm_engine.engine.running
    assert (
        llm.generate([[98]], SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].text == "b"
    )


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (lambda llm: llm.generate(None), "prompt"),
        (lambda llm: llm.generate([[1, "a"]]), "prompt"),
        (lambda llm: llm.generate("a", {"n": 1}), "sampling_params"),
        (lambda llm: llm.generate("a", lora_request="adapter"), "lora_request"),
        (lambda llm: llm.generate("a", priority="high"), "priority"),
        (lambda llm: llm.chat("hi"), "messages"),
        (lambda llm: llm.chat(["hi"]), "messages"),
        (lambda llm: llm.chat(None), "messages"),
        (lambda llm: llm.chat([[{"role": "user", "content": "a"}], ["b"]]), "messages"),
        (lambda llm: llm.beam_search("a", SamplingParams()), "params"),
        (lambda llm: BeamSearchParams(beam_width=0, max_tokens=1), "beam_width"),
        (lambda llm: BeamSearchParams(beam_width=1, max_tokens="1"), "max_tokens"),
        (
            lambda llm: BeamSearchParams(beam_width=1, max_tokens=1, length_penalty=float("nan")),
            "length_penalty",
        ),
        (
            lambda llm: BeamSearchParams(beam_width=1, max_tokens=1, length_penalty=1e308),
            "length_penalty",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(call, parameter):
    llm = make_llm()
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert caught.value.parameter == parameter and not llm.llm_engine.has_unfinished_requests()


def test_structured_output_of_a_chat_starts_behind_its_reasoning():
    class Recording(EchoEngine):
        def add(self, request):
            seen.append(request.params)
            super().add(request)

    seen: list[SamplingParams] = []
    entry = Entry(
        "reasoning_parser",
        "fake",
        "acme",
        "1.0",
        "pegboard_testing.fake_parsers:REASONING",
        "pegboard.reasoning_parser.v1",
    )
    plan = replace(echo_plan(), reasoning_parser="acme:fake")
    llm = LLM.from_engine(
        LLMEngine(plan, ByteTokenizer(), Recording(plan), Registry(Scan(entries=(entry,))))
    )
    structured = SamplingParams(
        max_tokens=2, structured_outputs=StructuredOutputsParams(json_object=True)
    )
    conversation = [{"role": "user", "content": "a"}]
    llm.chat([conversation] * 2, [structured, SamplingParams(max_tokens=2)], use_tqdm=False)
    assert seen[0].structured_outputs.reasoning_end_token_ids == [list(b"</think>")]
    assert (
        seen[1].structured_outputs is None
        and structured.structured_outputs.reasoning_end_token_ids is None
    )


@pytest.mark.parametrize(("named", "expected"), [("fake", [list(b"</think>")]), ("auto", None)])
def test_structured_output_of_a_prompt_waits_for_reasoning_when_the_parser_was_asked_for(
    named, expected
):
    """As in vLLM, where only the user names a parser. The parser that a family recommends is for
    chats only."""

    class Recording(EchoEngine):
        def add(self, request):
            seen.append(request.params.structured_outputs)
            super().add(request)

    seen: list[StructuredOutputsParams] = []
    entry = Entry(
        "reasoning_parser",
        "fake",
        "acme",
        "1.0",
        "pegboard_testing.fake_parsers:REASONING",
        "pegboard.reasoning_parser.v1",
    )
    plan = replace(echo_plan(reasoning_parser=named), reasoning_parser="acme:fake")
    llm = LLM.from_engine(
        LLMEngine(plan, ByteTokenizer(), Recording(plan), Registry(Scan(entries=(entry,))))
    )
    params = SamplingParams(
        max_tokens=2, structured_outputs=StructuredOutputsParams(json_object=True)
    )
    llm.generate(["a", "b"], params, use_tqdm=False)
    assert [structure.reasoning_end_token_ids for structure in seen] == [expected] * 2
    assert params.structured_outputs.reasoning_end_token_ids is None


def test_chat_renders_and_refuses_contradictions():
    llm = make_llm()
    conversation = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([conversation, conversation], SamplingParams(max_tokens=8), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["user: hi\nassistant: "] * 2
    assert outputs[0].outputs[0].text == "user: hi"
    with pytest.raises(RequestError, match="cannot both be true"):
        llm.chat(conversation, continue_final_message=True)
    with pytest.raises(RequestError, match="asked to fail"):
        llm.chat(conversation, chat_template_kwargs={"fail": True})


def test_interrupt_between_steps_leaves_it_usable():
    class Interrupting(EchoEngine):
        num_steps = 0

        def step(self):
            self.num_steps += 1
            if self.num_steps == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return super().step()

    llm = make_llm(Interrupting)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=100), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.llm_engine.engine.has_work
    assert (
        llm.generate([[98]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].text
        == "bb"
    )


def test_progress_bar_counts_requests():
    class Bar:
        def __init__(self, **arguments):
            self.total = arguments["total"]
            self.done = 0
            self.is_closed = False
            bars.append(self)

        def set_postfix_str(self, text):
            self.text = text

        def update(self, number):
            self.done += number

        def close(self):
            self.is_closed = True

    bars: list[Bar] = []
    make_llm().generate(["a", "b", "c"], SamplingParams(max_tokens=2), use_tqdm=Bar)
    (bar,) = bars
    assert (bar.total, bar.done, bar.is_closed) == (3, 3, True) and "tok/s" in bar.text


def test_unknown_and_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="tokenizer_revision a has no effect in Pegboard"):
        LLM("m", tokenizer_revision="a")
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM("m", max_modellen=4)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM("m", max_num_seqs=0)
    settings = engine_settings("m", {"plugin_options": {"attention.x": {"a": 1}}, "seed": 3})
    assert (settings.engine.model, settings.engine.seed, settings.plugins.options) == (
        "m",
        3,
        {"attention.x": {"a": 1}},
    )


def test_request_level_engine():
    engine = make_llm().llm_engine
    delta = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA)
    engine.add_request("one", "a", delta)
    engine.add_request("two", [98], delta)
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("one", "a", delta)
    texts = {"one": "", "two": ""}
    outputs = engine.step()
    assert {output.request_id for output in outputs} == {"one", "two"}
    engine.abort_request(["one", "unknown"])
    while engine.has_unfinished_requests():
        outputs += engine.step()
    for output in outputs:
        texts[output.request_id] += output.outputs[0].text
    assert texts["two"] == "bbb" and engine.get_num_unfinished_requests() == 0


def test_an_engine_that_gives_a_request_up():
    class GivingUp(EchoEngine):
        def step(self):
            deltas = super().step()
            for delta in deltas:
                if self._num_done[delta.request_id] == 2 and delta.request_id in self.running:
                    delta.finish_reason = "error"
                    delta.error = "the cache is on fire"
                    del self.running[delta.request_id]
            return deltas

    (output,) = make_llm(GivingUp).generate("a", use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"


class Branching(EchoEngine):
    """Always returns the logprobs of 98 (-0.1), 97 (-0.5) and end of sequence (-2)."""

    def _step_one(self, request_id, request):
        del self.running[request_id]
        logprobs = [PositionLogprobs([98, 98, 97, 257], [-0.1, -0.1, -0.5, -2.0], 1)]
        return [
            RequestDelta(
                request_id=request_id, token_ids=[98], logprobs=logprobs, finish_reason="length"
            )
        ]


def test_beam_search_keeps_the_best_by_score():
    (result,) = make_llm(Branching).beam_search(
        [[97]], BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True)
    )
    assert [(beam.text, round(beam.cum_logprob, 3)) for beam in result.sequences] == [
        ("abb", -0.2),
        ("aba", -0.6),
    ]
    assert [beam.finish_reason for beam in result.sequences] == ["length", "length"]
    assert result.sequences[0].logprobs[0][97] == Logprob(-0.5, 2, "a")
    (result,) = make_llm(Branching).beam_search(
        [[97]], BeamSearchParams(beam_width=3, max_tokens=1)
    )
    assert [beam.tokens for beam in result.sequences] == [[97, 98], [97, 97], [97, 257]]
    assert result.sequences[2].finish_reason == "stop" and result.sequences[2].text == "a"
    # the end-of-sequence token does not count
    assert score(result.sequences[2], 1.0, {257}) == -2.0
    with pytest.raises(RequestError, match="limit of 20"):
        make_llm(Branching).beam_search([[97]], BeamSearchParams(beam_width=11, max_tokens=1))


def test_metrics_cache_and_shutdown():
    with make_llm() as llm:
        llm.generate([[97, 98]], SamplingParams(max_tokens=3), use_tqdm=False)
        (tokens,) = llm.get_metrics()
        assert tokens == Counter("vllm:generation_tokens", {"model_name": "echo", "engine": "0"}, 3)
        assert llm.reset_prefix_cache() is True
        assert llm.get_default_sampling_params() == SamplingParams()

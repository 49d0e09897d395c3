"""Structured output through LLM and AsyncLLM on the real model: with steps in flight, n,
min_tokens, aborts, and reasoning."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.engine.grammar.request_grammar import RequestGrammar
from pegboard.errors import RequestError
from pegboard.front.async_llm import AsyncLLM
from pegboard_testing.contract_structured_output import json_judge
from pegboard_testing.structured_output_cases import PERSON, SHAPE

SIZES: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 16}
COMPACT: dict[str, Any] = {"disable_any_whitespace": True}
DATE = {
    "type": "object",
    "properties": {"year": {"type": "integer"}, "leap": {"type": "boolean"}},
    "required": ["year", "leap"],
}


def constrained(
    n: int = 1, max_tokens: int = 120, seed: int = 1, **structure: Any
) -> SamplingParams:
    return SamplingParams(
        n=n,
        max_tokens=max_tokens,
        seed=seed,
        structured_outputs=StructuredOutputsParams(**structure),
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["synchronous", "two in flight"])
def llm(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_gguf), max_in_flight=request.param, **SIZES) as made:
        yield made


def texts(outputs: list[Any]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def test_one_batch_of_every_kind(llm: LLM) -> None:
    params = [
        constrained(json=DATE, **COMPACT),
        constrained(json=SHAPE, **COMPACT),
        constrained(regex=r"\d{3}-\d{4}"),
        constrained(choice=["yes", "no"]),
        constrained(grammar='root ::= ("ab" | "cd"){1,3} "!"'),
        constrained(grammar='start: "x" | "y" "z"'),
        SamplingParams(max_tokens=12, seed=2),
        constrained(n=3, choice=["red", "green", "blue"]),
    ]
    outputs = llm.generate(["Answer: "] * len(params), params, use_tqdm=False)
    date, shape, number, answer, letters, lark, free, *colors = texts(outputs)
    assert json_judge(DATE)(date) and json_judge(SHAPE)(shape)
    assert re.fullmatch(r"\d{3}-\d{4}", number) and answer in ("yes", "no")
    assert re.fullmatch(r"(ab|cd){1,3}!", letters) and lark in ("x", "yz")
    assert free and set(colors) <= {"red", "green", "blue"} and len(colors) == 3
    assert (
        outputs[2].outputs[0].finish_reason == "stop" and outputs[2].outputs[0].stop_reason is None
    )


def test_masked_tokens_have_no_probability(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=3,
        logprobs=5,
        structured_outputs=StructuredOutputsParams(choice=["positive", "negative"]),
    )
    completion = llm.generate("The review is", params, use_tqdm=False)[0].outputs[0]
    firsts = {
        entry.decoded_token for entry in completion.logprobs[0].values() if entry.logprob > -1e30
    }
    assert all("positive".startswith(text) or "negative".startswith(text) for text in firsts)


def test_a_finished_text_ends_though_min_tokens_wants_more(llm: LLM) -> None:
    params = SamplingParams(
        min_tokens=30,
        max_tokens=60,
        structured_outputs=StructuredOutputsParams(choice=["positive", "negative"]),
    )
    completion = llm.generate("The review is", params, use_tqdm=False)[0].outputs[0]
    assert completion.text in ("positive", "negative") and completion.finish_reason == "stop"


def test_stop_strings_and_tokens_still_end_a_text(llm: LLM) -> None:
    params = constrained(regex="(ab)+c")
    params.stop = ["bab"]
    completion = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert completion.stop_reason == "bab" or re.fullmatch("(ab)?c|(ab)+", completion.text)


def test_ignore_eos_adds_stop_tokens_only(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=9,
        ignore_eos=True,
        structured_outputs=StructuredOutputsParams(choice=["positive"]),
    )
    completion = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert completion.text == "positive" and len(completion.token_ids) == 9


def test_a_bad_grammar_fails_its_request_only(llm: LLM) -> None:
    outputs = llm.generate(
        ["x", "y"], [constrained(regex="(a"), constrained(choice=["yes"])], use_tqdm=False
    )
    assert outputs[0].outputs[0].finish_reason == "error" and texts(outputs)[1] == "yes"
    with pytest.raises(RequestError, match="xgrammar: .*; guidance: .*"):
        llm.generate(
            "x",
            constrained(structural_tag='{"type": "structural_tag"}', whitespace_pattern="x"),
            use_tqdm=False,
        )


def test_what_leaves_no_token_is_said(llm: LLM) -> None:
    params = constrained(choice=["yes"])
    params.allowed_token_ids = [100]
    assert llm.generate("x", params, use_tqdm=False)[0].outputs[0].finish_reason == "error"


def test_the_grammar_starts_behind_the_reasoning(llm: LLM) -> None:
    """The model may write the end marker in any way. Here it writes several tokens that only
    together make the text."""
    tokenizer = llm.get_tokenizer()
    end = tokenizer.encode("</think>", add_special_tokens=False)
    thought = tokenizer.encode("I think so</think>", add_special_tokens=False)
    params = constrained(choice=["yes", "no"], reasoning_end_token_ids=[end])
    params.logit_bias = None
    free = (
        llm.generate("Say: ", constrained(choice=["yes", "no"]), use_tqdm=False)[0].outputs[0].text
    )
    assert free in ("yes", "no")
    open_ended = llm.generate("Say: ", params, use_tqdm=False)[0].outputs[0].text
    assert open_ended not in ("yes", "no"), "without its end, reasoning is free"
    params.allowed_token_ids = sorted(
        {*thought, *tokenizer.encode("yes", add_special_tokens=False), *params.eos_token_ids}
    )
    completion = llm.generate("Say: ", params, use_tqdm=False)[0].outputs[0]
    if "</think>" in completion.text and completion.finish_reason == "stop":
        assert completion.text.partition("</think>")[2] == "yes"


def living_grammars() -> list[RequestGrammar]:
    gc.collect()
    return [item for item in gc.get_objects() if type(item) is RequestGrammar]


def test_grammars_are_freed(llm: LLM) -> None:
    # kept alive, so that no id is used twice
    before = {id(grammar): grammar for grammar in living_grammars()}
    params = constrained(json=PERSON, max_tokens=4)
    llm.generate(["x"] * 6, params, use_tqdm=False)
    for i in range(4):
        llm.llm_engine.add_request(f"gone-{i}", "x", constrained(json=PERSON, max_tokens=400))
    llm.llm_engine.step()
    llm.llm_engine.abort_request([f"gone-{i}" for i in range(4)])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    for _ in range(3):
        llm.llm_engine.step()
    assert not [grammar for grammar in living_grammars() if id(grammar) not in before]


def test_the_engine_process_serves_it_too(smollm2_gguf: Path) -> None:
    async def run() -> tuple[list[str], str, str]:
        engine = await asyncio.to_thread(AsyncLLM, str(smollm2_gguf), **SIZES)
        try:

            async def last(params: SamplingParams, name: str) -> str:
                text = ""
                async for output in engine.generate("Answer: ", params, request_id=name):
                    text = output.outputs[0].text
                return text

            good = await asyncio.gather(
                *(last(constrained(json=DATE, seed=i, **COMPACT), f"good-{i}") for i in range(4))
            )
            with pytest.raises(RequestError) as caught:
                await last(constrained(regex="(a"), "bad")
            stream = engine.generate(
                "x", constrained(json=PERSON, max_tokens=300), request_id="gone"
            )
            await anext(stream)
            await stream.aclose()
            return good, str(caught.value), str(caught.value.parameter)
        finally:
            engine.shutdown()

    good, message, parameter = asyncio.run(run())
    assert all(json_judge(DATE)(text) for text in good)
    assert "unclosed group" in message or "parenthesis" in message
    assert parameter == "structured_outputs"


def test_json_of_pydantic_models(llm: LLM) -> None:
    from pydantic import BaseModel

    class Address(BaseModel):
        street: str
        zip: int | None

    class Person(BaseModel):
        name: str
        addresses: list[Address]

    schema = json.dumps(Person.model_json_schema())
    output = llm.generate(
        "A person: ", constrained(json=schema, max_tokens=300, **COMPACT), use_tqdm=False
    )[0].outputs[0]
    if output.finish_reason == "stop":
        Person.model_validate_json(output.text)

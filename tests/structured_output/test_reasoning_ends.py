"""The effect of the chat template's switches on the answer: whether it begins with reasoning, and
whether a grammar waits for the end of reasoning. The effect is the same as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

import pytest

from pegboard.interfaces.output_parser import OutputParserSetup, Reasoning
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard.plugins.registry import Registry

SWITCHES: tuple[Mapping[str, bool], ...] = (
    {},
    {"thinking": True},
    {"thinking": False},
    {"enable_thinking": True},
    {"enable_thinking": False},
)
# Per switch: text without markers is Reasoning or Content; a grammar waits (w) or not (-).
EXPECTED = {
    "deepseek_r1": "Rw Rw Rw Rw Rw",
    "deepseek_v3": "C- Rw C- Rw C-",
    "ernie45": "Rw Rw Rw Rw Rw",
    "glm45": "Rw Rw C- Rw C-",
    "glm47": "Rw Rw C- Rw C-",
    "granite": "C- Cw C- C- C-",
    "holo2": "Rw Rw C- Rw C-",
    "hunyuan_a13b": "Cw Cw Cw Cw Cw",
    "kimi_k2": "Rw Rw C- Rw C-",
    "minimax_m2": "Rw Rw Rw Rw Rw",
    "minimax_m2_append_think": "Cw Cw Cw Cw Cw",
    "mistral": "Cw Cw Cw Cw Cw",
    "olmo3": "Rw Rw Rw Rw Rw",
    "openai_gptoss": "Cw Cw Cw Cw Cw",
    "qwen3": "Rw Rw Rw Rw C-",
    "seed_oss": "Rw Rw Rw Rw Rw",
    "step3": "Rw Rw Rw Rw Rw",
}
CLOSED = {
    "<think>\n\n</think>\n\n": [
        "deepseek_v3",
        "glm45",
        "holo2",
        "hunyuan_a13b",
        "kimi_k2",
        "qwen3",
    ],
    "<seed:think></seed:think>": ["seed_oss"],
}
"""Prompts in which the template has closed the reasoning."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


def found(registry: Registry, name: str, switches: Mapping[str, bool], prompt_end: str) -> str:
    setup = OutputParserSetup(Vocabulary([b"a"], frozenset(), ()), (), switches, prompt_end)
    parser = registry.build(registry.find("reasoning_parser", name), setup)
    waits = "w" if parser.reasoning_end() else "-"
    events = [*parser.feed("Some words.", ()), *parser.finish()]
    return ("R" if isinstance(events[0], Reasoning) else "C") + waits


def test_every_parser_is_listed() -> None:
    assert {point.name for point in entry_points(group="pegboard.reasoning_parser.v1")} == set(
        EXPECTED
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_switches(registry: Registry, name: str) -> None:
    assert (
        " ".join(found(registry, name, switches, "<|assistant|>") for switches in SWITCHES)
        == EXPECTED[name]
    )


@pytest.mark.parametrize(
    ("end", "name"), [(end, name) for end, names in CLOSED.items() for name in names]
)
def test_a_prompt_that_closes_the_reasoning_goes_before_every_switch(
    registry: Registry, end: str, name: str
) -> None:
    assert {found(registry, name, switches, end) for switches in SWITCHES} == {"C-"}

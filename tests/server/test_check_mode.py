"""PEGBOARD_CHECK=1: a server runs as without it, and what a plugin returns wrongly is named, also
deep inside a step."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from faulty_server import Faults, faults  # noqa: F401  faults is a fixture
from test_faults import named, request_of

from pegboard.errors import PluginFailure
from pegboard.installed import Entry
from pegboard.interfaces.draft import Drafts, DraftSetup
from pegboard.interfaces.kv_connector import Match
from pegboard.interfaces.output_parser import Content, ToolCallEnd, ToolCallStart
from pegboard.interfaces.sampler import Sampled, SampleStep
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard_testing.check_mode import checked
from pegboard_testing.fake_draft import draft_step
from pegboard_testing.fake_limits import fake_limits


def test_a_server_runs_in_the_check_mode(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """All requests are answered. A value of a wrong type of what is called for each layer is blamed
    on the plugin that returned it."""
    monkeypatch.setenv("PEGBOARD_CHECK", "1")

    async def serve(place: str) -> None:
        async with faults.server() as served:
            for other in (
                "tool_parser/feed",
                "structured_output/fill",
                "tokenizer/encode",
                "model/forward",
            ):
                answer = await served.ask(**request_of(other))
                assert answer.status_code == 200, (other, answer.text)
            with faults.failing(place, "wrong type"):
                answer = await served.ask()
            assert named(answer.text, place) and "broke its contract" in answer.text, (
                place,
                answer.text,
            )

    for place in ("attention/the bound call", "quantization/the bound call"):
        asyncio.run(serve(place))


LOGITS = torch.zeros(2, 10)
STEP = SampleStep(np.array([0, 1]), np.array([0, 1, 2]))
DRAFT_STEP = draft_step([0], [[1]], [2])
NAN = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]])


class Request:
    num_tokens = 10


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values)[:, None]


GOOD = Sampled(column(1, 9), torch.ones(2))


@pytest.mark.parametrize(
    ("kind", "method", "arguments", "good", "wrong", "told"),
    [
        ("sampler", "sample", (LOGITS, STEP), GOOD, Sampled(column(1, 10), torch.ones(2)), "9"),
        ("sampler", "sample", (LOGITS, STEP), GOOD, Sampled(column(1), torch.ones(1)), "2 rows"),
        (
            "sampler",
            "sample",
            (LOGITS, STEP),
            GOOD,
            Sampled(column(1, 9), torch.zeros(2)),
            "counts",
        ),
        ("logits_processor", "apply", (LOGITS, None, None), LOGITS, LOGITS[:1], r"shape \[2, 10\]"),
        (
            "logits_processor",
            "apply",
            (NAN[:, :2] * 0, None, None),
            NAN[:1].expand(2, 2),
            NAN,
            r"rows \[1\] contain NaN",
        ),
        ("logits_processor", "apply", (LOGITS, None, None), LOGITS, LOGITS.double(), "float32"),
        (
            "draft",
            "propose",
            (DRAFT_STEP,),
            Drafts([np.array([1, 2])]),
            Drafts([np.array([1, 2, 3])]),
            "the limit is 2",
        ),
        (
            "draft",
            "propose",
            (DRAFT_STEP,),
            Drafts([np.array([1])]),
            Drafts([np.array([10**6])]),
            "not below",
        ),
        ("draft", "propose", (DRAFT_STEP,), Drafts([np.array([1])]), Drafts([]), "1 rows"),
        ("kv_connector", "match", (Request(), 4), Match(5), Match(6), "from 0 to 5"),
        ("kv_connector", "plan", (None,), b"", "", "expected bytes"),
        ("model", "logits", (NAN[:, :1] * 0 + 1,), torch.zeros(2, 5), torch.zeros(3, 5), "shape"),
        ("tokenizer", "encode", ("a",), [1], [1.0], "token ids"),
        ("tokenizer", "decode", ([1],), "a", b"a", "expected str"),
        (
            "tokenizer",
            "vocabulary",
            (),
            Vocabulary([b"a"], frozenset(), ()),
            Vocabulary(["a"], frozenset(), ()),
            "bytes",
        ),
        ("tool_parser", "feed", ("", ()), [Content("a")], [ToolCallEnd(0)], "ToolCallEnd"),
        (
            "tool_parser",
            "feed",
            ("", ()),
            [ToolCallStart(0, "a", "f")],
            [ToolCallStart(2, "b", "f")],
            "ToolCallStart",
        ),
        ("structured_output", "fill", (None, np.ones((1, 2))), None, None, ""),
    ],
)
def test_what_is_checked(
    kind: str, method: str, arguments: Any, good: Any, wrong: Any, told: str
) -> None:
    class Plugin:
        answer = good

    setattr(Plugin, method, lambda self, *args: self.answer)
    plugin = checked(
        Entry(kind, "acme", "acme", "1.0", "a:B", f"pegboard.{kind}.v1"),
        Plugin(),
        DraftSetup(fake_limits()),
    )
    assert getattr(plugin, method)(*arguments) is good
    if not told:
        arguments[1][:] = 0
    plugin.answer = wrong
    with pytest.raises(
        PluginFailure,
        match=f"plugin {kind}:acme .acme 1.0. broke its contract: Plugin.{method}.*{told}",
    ):
        getattr(plugin, method)(*arguments)

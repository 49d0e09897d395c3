"""Messages are the same on both sides of the process boundary, including errors."""

from __future__ import annotations

import pytest

from pegboard import errors
from pegboard.data.request import EngineRequest, LoRARequest, PositionLogprobs, RequestDelta
from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.engine.actions import Sleep
from pegboard.engine.boundary.messages import (
    Abort,
    Add,
    Control,
    ControlReply,
    Dead,
    Failure,
    Ready,
    Rejected,
    StepDeltas,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from pegboard.errors import Overloaded, PegboardError, PluginFailure, RequestError, UnknownModel


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(
            n=2,
            stop=["x"],
            logit_bias={3: 1.5},
            structured_outputs=StructuredOutputsParams(json={"a": 1}),
        ),
        SamplingParams(temperature=0, max_tokens=None, extra_args={"k": [1, None]}),
    ],
)
def test_requests(params):
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        params=params,
        priority=-1,
        cache_salt="s",
        lora=LoRARequest("a", 1, "/a"),
    )
    assert decode_to_engine(encode(Add(request))) == Add(request)


def test_everything_else():
    delta = RequestDelta(
        request_id="r",
        token_ids=[1],
        logprobs=[PositionLogprobs([1, 2], [-0.1, -0.2], 1)],
        stop_reason="s",
    )
    for message in (Abort(["a"]), Control(3, Sleep(2))):
        assert decode_to_engine(encode(message)) == message
    failure = Failure.of(RequestError("no", parameter="p"))
    for message in (
        Ready({"a": 1}),
        StepDeltas([delta]),
        Rejected("r", failure),
        ControlReply(3, {"a": 1}),
        Dead(failure),
    ):
        assert decode_from_engine(encode(message)) == message


class OwnError(RequestError):
    """A class that the other side does not know."""


@pytest.mark.parametrize(
    ("error", "type_", "attributes"),
    [
        (RequestError("m", parameter="p"), RequestError, {"parameter": "p"}),
        (UnknownModel("m"), UnknownModel, {"status": 404}),
        (OwnError("m", parameter="p"), RequestError, {"parameter": "p"}),
        (Overloaded("m", retry_after_s=3.5), Overloaded, {"retry_after_s": 3.5, "status": 503}),
        (PluginFailure("m", plugin="kind:name"), PluginFailure, {"plugin": "kind:name"}),
        (ValueError("m"), PegboardError, {}),
    ],
)
def test_errors_travel_by_type(error, type_, attributes):
    again = Failure.of(error).error()
    assert type(again) is type_
    assert "m" in str(again)
    assert {name: getattr(again, name) for name in attributes} == attributes


def test_every_error_of_the_tree_travels():
    tree = [
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, PegboardError)
    ]
    assert len(tree) > 10
    for cls in tree:
        assert type(Failure.of(cls("m")).error()) is cls

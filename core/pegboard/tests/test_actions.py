"""Actions: their arguments, their answers, and the methods that are made from them."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, get_args

import pytest

from pegboard.data.request import LoRARequest
from pegboard.engine.actions import (
    ACTIONS,
    Action,
    AddLoRA,
    AnyAction,
    CollectiveRpc,
    ListLoRAs,
    Pause,
    SaveShardedState,
    Sleep,
    Stats,
    UpdateWeights,
    WakeUp,
    action_of,
    answer_of,
    check_types,
)
from pegboard.engine.boundary.messages import Control, decode_to_engine, encode
from pegboard.errors import RequestError
from pegboard.front.controls import AsyncControls, SyncControls
from pegboard_testing.fake_engine import FakeEngine


def test_every_action_can_be_sent_and_is_carried_out() -> None:
    assert set(get_args(AnyAction)) == set(Action.__subclasses__())
    controls = FakeEngine().engine._controls
    assert set(controls._handlers) == set(ACTIONS.values())
    assert all(action.__doc__ for action in ACTIONS.values())


@pytest.mark.parametrize(
    "action",
    [
        Stats(),
        Sleep(2, "keep"),
        WakeUp(["weights"]),
        AddLoRA(LoRARequest("a", 1, "/a")),
        CollectiveRpc("m", [1, b"x", None], {"k": {"a": 1.5}}),
        SaveShardedState("/a", None, 5),
    ],
)
def test_actions_cross_the_boundary(action: Any) -> None:
    check_types(action)
    assert decode_to_engine(encode(Control(3, action))) == Control(3, action)


@pytest.mark.parametrize(
    ("tag", "arguments", "told", "field"),
    [
        ("fly", {}, "unknown action 'fly'; there are stats,", "action"),
        ("sleep", {"level": 3}, "level must be 0, 1 or 2, got 3", "level"),
        ("sleep", {"mode": "now"}, "mode must be one of abort, wait, keep, got 'now'", "mode"),
        ("update_weights", {"path": "/a", "mode": 1}, "mode must be one of", "mode"),
        ("save_sharded_state", {"path": "/a", "max_size": 0}, "at least 1 byte, got 0", "max_size"),
        ("wake_up", {"tags": ["kv"]}, "unknown tag 'kv'; there are weights, kv_cache", "tags"),
        ("sleep", {"deep": True}, "sleep: Unexpected keyword argument 'deep'", None),
        ("remove_lora", {}, "remove_lora: Missing required argument 'lora_id'", None),
    ],
)
def test_wrong_arguments(tag: str, arguments: Any, told: str, field: str | None) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        action_of(tag, arguments)
    assert caught.value.parameter == field


ACTIONS_BY_CLASS = {action: tag for tag, action in ACTIONS.items()}


@pytest.mark.parametrize(
    "action",
    [
        Pause(clear_cache="yes"),  # type: ignore[arg-type]
        CollectiveRpc(len),
        CollectiveRpc("m", [object()]),
        AddLoRA(3),  # type: ignore[arg-type]
    ],
)
def test_what_the_engine_process_could_not_read_is_not_sent(action: Any) -> None:
    with pytest.raises(RequestError, match=ACTIONS_BY_CLASS[type(action)]):
        check_types(action)


def test_answers_get_their_types_back() -> None:
    assert answer_of(ListLoRAs(), [2, 1]) == {1, 2}
    assert answer_of(CollectiveRpc("m"), [None, {"a": [1]}]) == [None, {"a": [1]}]
    assert answer_of(Sleep(), None) is None


def test_methods_are_like_hand_written_ones() -> None:
    asked: list[Action[Any]] = []

    async def ask(action: Action[Any]) -> Any:
        asked.append(action)
        return len(asked)

    client = AsyncControls(ask)
    assert asyncio.run(client.sleep(2, mode="keep")) == 1
    assert SyncControls(asked.append).wake_up(tags=["weights"]) is None
    assert asked == [Sleep(2, "keep"), WakeUp(["weights"])]
    assert inspect.iscoroutinefunction(AsyncControls.sleep)
    assert str(inspect.signature(AsyncControls.sleep)) == str(inspect.signature(SyncControls.sleep))
    assert list(inspect.signature(SyncControls.sleep).parameters) == ["self", "level", "mode"]
    assert SyncControls.sleep.__doc__ == Sleep.__doc__
    assert SyncControls.update_weights.__doc__.startswith(UpdateWeights.__doc__)
    for each in (*vars(AsyncControls).items(), *vars(SyncControls).items()):
        assert each[0].startswith("_") or inspect.getdoc(each[1]), f"{each[0]} is not documented"

"""The check mode, PEGBOARD_CHECK=1: everything that chosen plugins return is checked while they
run, and the plugin is named.

The registry passes every plugin that it builds through `checked`. Without the check mode nothing is
wrapped. With it every step runs eagerly, because a recording runs no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.data.batch import TransferReport
from pegboard.interfaces.kv_connector import Match, Release
from pegboard.interfaces.output_parser import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard.interfaces.scheduling_policy import StepBudget
from pegboard.interfaces.tokenizer import Rendered, Vocabulary
from pegboard.worker.first_steps import (
    Check,
    Checked,
    attention_check,
    check_drafts,
    check_sampled,
    check_tensor,
    watched,
    weight_checks,
)

if TYPE_CHECKING:
    from pegboard.installed import Entry


def checked(entry: "Entry", built: Any, setup: object) -> Any:
    """Return the plugin's object with checks, or the object itself if nothing of this kind is
    checked."""
    make = CHECKS.get(entry.kind)
    return built if make is None else Checked(built, entry.id, make(entry.id, setup))


def _is(*expected: Any) -> Check:
    def check(result: Any, *args: Any, **more: Any) -> Any:
        assert isinstance(result, expected), (
            f"expected {' or '.join(kind.__name__ for kind in expected)}"
        )
        return result

    return check


def _ids(result: Any, size: int | None = None) -> Any:
    assert all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in result
    ), "expected token ids"
    assert size is None or all(token < size for token in result), f"a token id is not below {size}"
    return result


def _tensor(result: Any, shape: Iterable[int], dtype: Any = None, given: Iterable[Any] = ()) -> Any:
    """A tensor of this shape and type, without NaN unless there is one in `given`."""
    check_tensor(result, shape, dtype)
    if any(
        value is not None and value.is_floating_point() and bool(value.isnan().any())
        for value in given
    ):
        return result
    rows = result.flatten(1).isnan().any(1).nonzero().flatten().tolist() if result.dim() > 1 else []
    assert not rows, f"rows {rows[:8]} contain NaN"
    return result


def _attention(plugin: str, setup: Any) -> Mapping[str, Check]:
    def bind(bound: Any, layer: Any) -> Any:
        return watched(
            bound,
            plugin,
            f"attention of layer {layer.layer_index}",
            attention_check(layer, _tensor),
        )

    return {"bind": bind}


def _quantization(plugin: str, setup: Any) -> Mapping[str, Check]:
    def weight(method: Any, layer: Any) -> Any:
        if method is None:
            return None
        return Checked(
            method,
            plugin,
            {**weight_checks(plugin, layer, _tensor), "tensors": _is(list), "declare": _is(list)},
        )

    return {"linear": weight, "embedding": weight}


def _model(plugin: str, setup: Any) -> Mapping[str, Check]:
    return {
        "embed": lambda result, ids, *inputs: _tensor(result, (len(ids), result.shape[-1]), None),
        "forward": lambda result, hidden, positions: _tensor(
            result, (len(positions), result.shape[-1]), None, (hidden,)
        ),
        "logits": lambda result, hidden: _tensor(
            result, (len(hidden), result.shape[-1]), "torch.float32", (hidden,)
        ),
    }


def _logits_processor(plugin: str, setup: Any) -> Mapping[str, Check]:
    return {"apply": lambda result, logits, *given: _tensor(result, logits.shape, logits.dtype)}


def _kv_connector(plugin: str, setup: Any) -> Mapping[str, Check]:
    def match(result: Any, request: Any, num_local_tokens: int) -> Any:
        _is(Match, type(None))(result)
        rest = request.num_tokens - num_local_tokens
        assert result is None or 0 <= result.num_tokens < max(rest, 1), (
            f"num_tokens must be from 0 to {rest - 1}"
        )
        assert result is None or result.load in ("in_step", "between_steps"), (
            f"load is {result.load!r}"
        )
        return result

    def end(result: Any) -> Any:
        _is(TransferReport)(result)
        assert all(
            isinstance(key, str) for key in (*result.saved, *result.loaded, *result.failed)
        ), "expected request ids"
        return result

    return {"match": match, "plan": _is(bytes), "released": _is(Release), "end": end}


def _scheduling_policy(plugin: str, setup: Any) -> Mapping[str, Check]:
    def budget(result: Any, load: Any) -> Any:
        _is(StepBudget)(result)
        assert result.max_tokens > 0 and result.max_chunk > 0, (
            "max_tokens and max_chunk must be over 0"
        )
        return result

    def victim(result: Any, running: Any, need: Any) -> Any:
        assert result is None or any(result is request for request in running), (
            "expected one of the running requests"
        )
        return result

    return {"budget": budget, "victim": victim}


def _structured_output(plugin: str, setup: Any) -> Mapping[str, Check]:
    def fill(result: Any, grammars: Any, masks: Any) -> Any:
        empty = [row for row, mask in enumerate(masks) if not mask.any()]
        assert not empty, f"the masks of rows {empty[:8]} allow no token"
        return result

    return {"reject": _is(str, type(None)), "fill": fill}


def _tokenizer(plugin: str, setup: Any) -> Mapping[str, Check]:
    def vocabulary(result: Any) -> Any:
        _is(Vocabulary)(result)
        wrong = next((token for token in result.token_bytes if not isinstance(token, bytes)), None)
        assert wrong is None, f"token_bytes has {wrong!r}, expected bytes"
        return result

    def stream(result: Any, *args: Any, **more: Any) -> Any:
        return Checked(result, plugin, {"push": _is(str), "flush": _is(str)})

    return {
        "encode": lambda result, text, **more: _ids(_is(list)(result)),
        "decode": _is(str),
        "render": lambda result, chat: (
            _is(Rendered)(result) and _ids(result.token_ids) is not None and result
        ),
        "stream": stream,
        "vocabulary": vocabulary,
    }


def _parser(plugin: str, setup: Any) -> Mapping[str, Check]:
    seen: list[Event] = []

    def events(result: Any, *args: Any) -> Any:
        _is(list)(result)
        # core drops empty texts
        seen.extend(event for event in result if getattr(event, "text", "x"))
        check_order(seen)
        return result

    return {"feed": events, "finish": events}


def check_order(events: Sequence[Event]) -> None:
    """Calls are numbered from 0, one is open at a time, arguments and ends belong to the open call,
    and no event is empty."""
    count = 0
    is_open = False
    ids = set()
    for event in events:
        match event:
            case Content(text) | Reasoning(text):
                assert text, "empty event"
            case ToolCallStart(index, id, name):
                assert index == count and name and id and id not in ids, event
                ids.add(id)
                count = count + 1
                is_open = True
            case ToolCallArguments(index, text):
                assert is_open and index == count - 1 and text, event
            case ToolCallEnd(index):
                assert is_open and index == count - 1, event
                is_open = False


CHECKS: dict[str, Callable[[str, Any], Mapping[str, Check]]] = {
    "attention": _attention,
    "quantization": _quantization,
    "model": _model,
    "sampler": lambda plugin, setup: {"sample": check_sampled},
    "logits_processor": _logits_processor,
    "draft": lambda plugin, setup: {"propose": check_drafts(setup.limits.vocab_size)},
    "kv_connector": _kv_connector,
    "scheduling_policy": _scheduling_policy,
    "structured_output": _structured_output,
    "tokenizer": _tokenizer,
    "tool_parser": _parser,
    "reasoning_parser": _parser,
    "platform": lambda plugin, setup: {"replay": lambda result, programs: None},
}
"""kind → its checks, by the method that they belong to."""

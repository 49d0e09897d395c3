"""The check mode, PEGBOARD_CHECK=1: everything that chosen plugins return is checked while they run, and the plugin is named.

The registry passes every plugin that it builds through `checked`. Without the check mode nothing is wrapped. With it every step
runs eagerly, because a recording runs no Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.data.batch import TransferReport
from pegboard.errors import PegboardError, PluginFailure
from pegboard.interfaces.draft import Drafts
from pegboard.interfaces.kv_connector import Match, Release
from pegboard.interfaces.output_parser import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from pegboard.interfaces.scheduling_policy import StepBudget
from pegboard.interfaces.tokenizer import Rendered, Vocabulary

if TYPE_CHECKING:
    from pegboard.plugins.discovery import Entry

Check = Callable[..., Any]
"""check(result, *arguments) → the result to hand on. Raises AssertionError, which says what is wrong."""


class Checked:
    """Stands for a plugin's object. The calls in `checks` are checked."""

    def __init__(self, built: Any, plugin: str, checks: Mapping[str, Check]) -> None:
        object.__setattr__(self, "_built", built)
        object.__setattr__(self, "_plugin", plugin)
        object.__setattr__(self, "_checks", checks)

    def __getattr__(self, name: str) -> Any:
        value, check = getattr(self._built, name), self._checks.get(name)
        return value if check is None else watched(value, self._plugin, f"{type(self._built).__name__}.{name}", check)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._built, name, value)


def watched(function: Callable[..., Any], plugin: str, name: str, check: Check) -> Callable[..., Any]:
    """Return the function with a check of what it returns. Whatever the check raises becomes a PluginFailure."""

    @functools.wraps(function, updated=())
    def call(*args: Any, **more: Any) -> Any:
        result = function(*args, **more)
        try:
            return check(result, *args, **more)
        except PegboardError:
            raise
        except Exception as error:
            told = f"plugin {plugin} broke its contract: {name}() returned {_shown(result)}: {error}"
            raise PluginFailure(told, plugin=plugin) from error

    return call


def checked(entry: "Entry", built: Any, setup: object) -> Any:
    """Return the plugin's object with checks, or the object itself if nothing of this kind is checked."""
    make = CHECKS.get(entry.kind)
    return built if make is None else Checked(built, entry.id, make(entry.id, setup))


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" {list(shape)} {value.dtype}" if shape is not None else "")


def _is(*expected: Any) -> Check:
    def check(result: Any, *args: Any, **more: Any) -> Any:
        assert isinstance(result, expected), f"expected {' or '.join(kind.__name__ for kind in expected)}"
        return result

    return check


def _ids(result: Any, size: int | None = None) -> Any:
    assert all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in result), "expected token ids"
    assert size is None or all(token < size for token in result), f"a token id is not below {size}"
    return result


def _tensor(result: Any, shape: Iterable[int], dtype: Any, given: Iterable[Any] = ()) -> Any:
    """A tensor of this shape and type, without NaN unless there is one in `given`."""
    assert hasattr(result, "isnan"), "expected a Tensor"
    assert list(result.shape) == list(shape), f"expected the shape {list(shape)}"
    assert dtype is None or str(result.dtype) == str(dtype), f"expected {dtype}"
    if any(value is not None and value.is_floating_point() and bool(value.isnan().any()) for value in given):
        return result
    rows = result.flatten(1).isnan().any(1).nonzero().flatten().tolist() if result.dim() > 1 else []
    assert not rows, f"rows {rows[:8]} contain NaN"
    return result


def _attention(plugin: str, setup: Any) -> Mapping[str, Check]:
    def bind(bound: Any, layer: Any) -> Any:
        def check(result: Any, q: Any, k: Any = None, v: Any = None) -> Any:
            return _tensor(result, (len(q), layer.num_heads * (layer.value_dim or layer.head_dim)), q.dtype, (q, k, v))

        return watched(bound, plugin, f"attention of layer {layer.layer_index}", check)

    return {"bind": bind}


def _quantization(plugin: str, setup: Any) -> Mapping[str, Check]:
    def weight(method: Any, layer: Any) -> Any:
        if method is None:
            return None

        def bind(columns: int) -> Check:
            def check(result: Any, x: Any) -> Any:
                return _tensor(result, (*x.shape[: 1 if x.dim() > 1 else None], columns), None, (x,))

            return lambda bound, kernels: watched(bound, plugin, layer.path, check)

        is_table = hasattr(layer, "width")
        checks = {"bind": bind(layer.width if is_table else layer.out_features), "num_bytes": _is(int), "declare": _is(list)}
        if is_table:
            checks["bind_head"] = bind(layer.num_rows)
        return Checked(method, plugin, checks)

    return {"linear": weight, "embedding": weight}


def _model(plugin: str, setup: Any) -> Mapping[str, Check]:
    return {
        "embed": lambda result, ids: _tensor(result, (len(ids), result.shape[-1]), None),
        "forward": lambda result, hidden, positions: _tensor(result, (len(positions), result.shape[-1]), None, (hidden,)),
        "logits": lambda result, hidden: _tensor(result, (len(hidden), result.shape[-1]), "torch.float32", (hidden,)),
    }


def _sampler(plugin: str, setup: Any) -> Mapping[str, Check]:
    def sample(result: Any, logits: Any, step: Any) -> Any:
        num_rows, size = len(step.rows), logits.shape[-1]
        token_ids, counts = result.token_ids, result.counts
        assert token_ids.dim() == 2 and len(token_ids) == len(counts) == num_rows, f"expected {num_rows} rows"
        assert bool(((counts >= 1) & (counts <= token_ids.shape[1])).all()), "counts are outside of token_ids"
        valid = token_ids[counts[:, None] >= token_ids.new_ones(token_ids.shape).cumsum(1)]
        assert bool(((valid >= 0) & (valid < size)).all()), f"a token id is not between 0 and {size - 1}"
        return result

    return {"sample": sample}


def _logits_processor(plugin: str, setup: Any) -> Mapping[str, Check]:
    return {"apply": lambda result, logits, *given: _tensor(result, logits.shape, logits.dtype)}


def _draft(plugin: str, setup: Any) -> Mapping[str, Check]:
    def propose(result: Any, step: Any) -> Any:
        _is(Drafts)(result)
        assert len(result.token_ids) == len(step.rows), f"expected proposals for {len(step.rows)} rows"
        for ids, most in zip(result.token_ids, step.max_drafts.tolist(), strict=True):
            assert len(ids) <= most, f"{len(ids)} proposals, the limit is {most}"
            _ids([int(token) for token in ids], setup.limits.vocab_size)
        return result

    return {"propose": propose}


def _kv_connector(plugin: str, setup: Any) -> Mapping[str, Check]:
    def match(result: Any, request: Any, num_local_tokens: int) -> Any:
        _is(Match, type(None))(result)
        rest = request.num_tokens - num_local_tokens
        assert result is None or 0 <= result.num_tokens < max(rest, 1), f"num_tokens must be from 0 to {rest - 1}"
        assert result is None or result.load in ("in_step", "between_steps"), f"load is {result.load!r}"
        return result

    def end(result: Any) -> Any:
        _is(TransferReport)(result)
        assert all(isinstance(key, str) for key in (*result.saved, *result.loaded, *result.failed)), "expected request ids"
        return result

    return {"match": match, "plan": _is(bytes), "released": _is(Release), "end": end}


def _scheduling_policy(plugin: str, setup: Any) -> Mapping[str, Check]:
    def budget(result: Any, load: Any) -> Any:
        _is(StepBudget)(result)
        assert result.max_tokens > 0 and result.max_chunk > 0, "max_tokens and max_chunk must be over 0"
        return result

    def victim(result: Any, running: Any, need: Any) -> Any:
        assert result is None or any(result is request for request in running), "expected one of the running requests"
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
        "render": lambda result, chat: _is(Rendered)(result) and _ids(result.token_ids) is not None and result,
        "stream": stream,
        "vocabulary": vocabulary,
    }


def _parser(plugin: str, setup: Any) -> Mapping[str, Check]:
    seen: list[Event] = []

    def events(result: Any, *args: Any) -> Any:
        _is(list)(result)
        seen.extend(event for event in result if getattr(event, "text", "x"))  # core drops empty texts
        check_order(seen)
        return result

    return {"feed": events, "finish": events}


def check_order(events: Sequence[Event]) -> None:
    """Calls are numbered from 0, one is open at a time, arguments and ends belong to the open call, and no event is empty."""
    count, is_open, ids = 0, False, set()
    for event in events:
        match event:
            case Content(text) | Reasoning(text):
                assert text, "empty event"
            case ToolCallStart(index, id, name):
                assert index == count and name and id and id not in ids, event
                ids.add(id)
                count, is_open = count + 1, True
            case ToolCallArguments(index, text):
                assert is_open and index == count - 1 and text, event
            case ToolCallEnd(index):
                assert is_open and index == count - 1, event
                is_open = False


CHECKS: dict[str, Callable[[str, Any], Mapping[str, Check]]] = {
    "attention": _attention,
    "quantization": _quantization,
    "model": _model,
    "sampler": _sampler,
    "logits_processor": _logits_processor,
    "draft": _draft,
    "kv_connector": _kv_connector,
    "scheduling_policy": _scheduling_policy,
    "structured_output": _structured_output,
    "tokenizer": _tokenizer,
    "tool_parser": _parser,
    "reasoning_parser": _parser,
    "platform": lambda plugin, setup: {"replay": lambda result, programs: None},
}
"""kind → its checks, by the method that they belong to."""

"""Checks of what plugins return in the first steps of an engine. Native code that gets it trusts
shapes and types, and with wrong ones it would read and write other memory. The check mode
(PEGBOARD_CHECK=1) checks more, in every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pegboard.errors import PegboardError, PluginFailure, blame, culprit
from pegboard.interfaces.draft import Drafts
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer
from pegboard.interfaces.sampler import Sampled
from pegboard.worker.drafting import SampleAndDraft
from pegboard.worker.drafting_ahead import SampleAhead
from pegboard.worker.endings import SampleOnHost
from pegboard.worker.loaded_model import LoadedModel
from pegboard.worker.model_runner import ModelRunner
from pegboard.worker.room import STEPS, explained

if TYPE_CHECKING:
    from pegboard.data.batch import Batch
    from pegboard.interfaces.attention import AttentionLayer

Check = Callable[..., Any]
"""check(result, *arguments) → the result to hand on. Raises AssertionError, which says what is
wrong."""


class Checked:
    """Stands for a plugin's object. The calls in `checks` are checked."""

    def __init__(self, built: Any, plugin: str, checks: Mapping[str, Check]) -> None:
        object.__setattr__(self, "_built", built)
        object.__setattr__(self, "_plugin", plugin)
        object.__setattr__(self, "_checks", checks)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._built, name)
        check = self._checks.get(name)
        return (
            value
            if check is None
            else watched(value, self._plugin, f"{type(self._built).__name__}.{name}()", check)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._built, name, value)


def watched(
    function: Callable[..., Any], plugin: str, name: str, check: Check
) -> Callable[..., Any]:
    """Return the function with a check of what it returns. Whatever the check raises becomes a
    PluginFailure."""

    @functools.wraps(function, updated=())
    def call(*args: Any, **more: Any) -> Any:
        result = function(*args, **more)
        try:
            return check(result, *args, **more)
        except PegboardError:
            raise
        except Exception as error:
            message = (
                f"plugin {plugin} broke its contract: {name} returned {_shown(result)}: {error}"
            )
            raise PluginFailure(message, plugin=plugin) from error

    return call


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (
        f" {list(shape)} {value.dtype}" if shape is not None else ""
    )


def check_tensor(
    result: Any, shape: Iterable[int], dtype: Any = None, given: Iterable[Any] = ()
) -> Any:
    """Return the result, which must be a tensor of this shape and type (None = any). given: what it
    was computed from."""
    assert hasattr(result, "isnan"), "expected a Tensor"
    fits = result.shape == tuple(shape) and (dtype is None or str(dtype) == str(result.dtype))
    assert fits, f"expected the shape {list(shape)}{'' if dtype is None else f' of {dtype}'}"
    return result


def check_sampled(result: Any, logits: Any, step: Any) -> Any:
    """Return what a sampler returned, whose tokens must be in the vocabulary."""
    assert isinstance(result, Sampled), "expected Sampled"
    num_rows = len(step.rows)
    size = logits.shape[-1]
    token_ids = result.token_ids
    counts = result.counts
    assert token_ids.dim() == 2 and len(token_ids) == len(counts) == num_rows, (
        f"expected {num_rows} rows"
    )
    assert bool(((counts >= 1) & (counts <= token_ids.shape[1])).all()), (
        "counts are outside of token_ids"
    )
    valid = token_ids[counts[:, None] >= token_ids.new_ones(token_ids.shape).cumsum(1)]
    assert bool(((valid >= 0) & (valid < size)).all()), (
        f"a token id is not between 0 and {size - 1}"
    )
    return result


def check_drafts(vocab_size: int) -> Check:
    """Return the check of what a draft plugin proposes."""

    def check(result: Any, step: Any) -> Any:
        assert isinstance(result, Drafts), "expected Drafts"
        assert len(result.token_ids) == len(step.rows), (
            f"expected proposals for {len(step.rows)} rows"
        )
        for ids, most in zip(result.token_ids, step.max_drafts.tolist(), strict=True):
            assert len(ids) <= most, f"{len(ids)} proposals, the limit is {most}"
            assert all(0 <= int(token) < vocab_size for token in ids), (
                f"a token id is not below {vocab_size}"
            )
        return result

    return check


def check_padded(vocab_size: int) -> Check:
    """Return the check of what a draft plugin proposes without knowing the tokens."""

    def check(result: Any, step: Any) -> Any:
        assert isinstance(result, tuple) and len(result) == 2, "expected (drafts, probabilities)"
        drafts, probs = result
        num_rows = int(step.samples.sum())
        if not (num_rows and step.depths):
            return result
        depths = drafts.shape[-1]
        assert depths <= step.depths, f"{depths} proposals, the limit is {step.depths}"
        check_tensor(drafts, (num_rows, depths), "torch.int64")
        assert bool(((drafts >= 0) & (drafts < vocab_size)).all()), (
            f"a token id is not below {vocab_size}"
        )
        if probs is not None:
            check_tensor(probs, (num_rows, depths, vocab_size), "torch.float32")
        return result

    return check


MODEL_CHECKS: Mapping[str, Check] = {
    "embed": lambda result, ids, *inputs: check_tensor(result, (len(ids), result.shape[-1])),
    "forward": lambda result, hidden, *positions: check_tensor(
        result, (len(hidden), result.shape[-1])
    ),
    "logits": lambda result, hidden: check_tensor(
        result, (len(hidden), result.shape[-1]), "torch.float32"
    ),
}


def attention_check(layer: AttentionLayer, check: Check = check_tensor) -> Check:
    """Return the check of a layer's bound attention. check: checks a tensor as `check_tensor`
    does."""

    def attended(result: Any, q: Any, *others: Any) -> Any:
        width = layer.num_heads * layer.result_dim
        return check(result, (len(q), width), q.dtype, (q, *others))

    return attended


def weight_checks(
    plugin: str, layer: LinearLayer | EmbeddingLayer, check: Check = check_tensor
) -> Mapping[str, Check]:
    """Return the checks of a weight method: of what its bound callables return. Those of heads may
    return any type."""

    def bound(columns: int, has_type: bool) -> Check:
        def multiplied(result: Any, x: Any, *more: Any) -> Any:
            dtype = x.dtype if has_type and x.is_floating_point() else None
            return check(result, (len(x), columns), dtype, (x,))

        return lambda call, *given: watched(
            call, plugin, f"the bound call of {layer.path}", multiplied
        )

    if isinstance(layer, EmbeddingLayer):
        return {"bind": bound(layer.width, False), "bind_head": bound(layer.num_rows, False)}
    rows = layer.out_features // (layer.num_experts or 1)
    return {"bind": bound(rows, not layer.is_head), "bind_experts": bound(rows, True)}


@contextmanager
def checked(runner: ModelRunner) -> Iterator[None]:
    """In the block, what plugins return in the runner's steps is checked: the bound calls of
    attention and weights, the model, the sampler and the draft plugin. At its end every layer is
    bound again, without checks. Errors name the plugin."""
    target = runner.parts.loaded
    models = [target, *([] if runner.parts.draft is None else [runner.parts.draft])]
    places = [*_parts(runner), *(place for loaded in models for place in _model(loaded))]
    attention = [dict(loaded.build.attention) for loaded in models]
    for loaded in models:
        bound = loaded.build.attention
        for index, layer in loaded.build.declared.attention.items():
            plugin = loaded.attention.entries[index].id
            name = f"attention of layer {index}"
            bound[index] = watched(bound[index], plugin, name, attention_check(layer))
    for holder, name, _, watching in places:
        setattr(holder, name, watching)
    for loaded in models:
        loaded.rebind()
    with blame(target.entry.id, target.setup.registry.modules):
        yield
    for holder, name, plain, _ in places:
        setattr(holder, name, plain)
    for loaded, bound in zip(models, attention, strict=True):
        loaded.build.attention.update(bound)
        loaded.rebind()


Place = tuple[Any, str, Any, Any]
"""An object and its attribute, the value of the attribute, and what is checked in its place."""


def _model(loaded: LoadedModel) -> Iterator[Place]:
    model = loaded.model
    yield loaded.stages, "model", model, Checked(model, loaded.entry.id, MODEL_CHECKS)
    yield from _weights(loaded)


def _parts(runner: ModelRunner) -> Iterator[Place]:
    registry = runner.parts.loaded.setup.registry
    ending = runner.ending
    if isinstance(ending, SampleOnHost):
        plugin = registry.decisions["sampler", ""].require().id
        sampler = Checked(ending.sampler, plugin, {"sample": check_sampled})
        yield ending, "sampler", ending.sampler, sampler
    if isinstance(ending, SampleAndDraft | SampleAhead):
        plugin = registry.decisions["draft", ""].require().id
        size = runner.parts.limits.vocab_size
        checks = {"propose": check_drafts(size), "propose_padded": check_padded(size)}
        yield ending, "proposer", ending.proposer, Checked(ending.proposer, plugin, checks)


def _weights(loaded: LoadedModel) -> Iterator[Place]:
    """Find the layers' attributes that are weight methods, or lists of them."""
    modules = loaded.setup.registry.modules()
    watching = {}
    for method, layer, source in loaded.build.declared.weights:
        plugin = (
            culprit(modules, [type(method).__module__, type(source).__module__])
            or type(source).__name__
        )
        watching[id(method)] = Checked(method, plugin, weight_checks(plugin, layer))
    for holder in loaded.layers:
        for name, value in list(vars(holder).items()):
            if id(value) in watching:
                yield holder, name, value, watching[id(value)]
            elif isinstance(value, list) and any(id(item) in watching for item in value):
                yield holder, name, value, [watching.get(id(item), item) for item in value]


def try_steps(runner: ModelRunner, *steps: "Batch") -> None:
    """Run steps, in which what plugins return is checked."""
    with checked(runner), explained(runner.parts.loaded.setup.platform, *STEPS):
        for batch in steps:
            runner.run(batch)()

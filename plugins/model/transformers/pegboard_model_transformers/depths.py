"""A part of a transformers model's layers, and the hidden states between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build
from pegboard_model_transformers.probe import AttentionCall


def divide(
    build: Build, inner: nn.Module, calls: Sequence[AttentionCall], probe: Callable[[], object]
) -> list[AttentionCall | None]:
    """Keep only `build.layers` of a base model, and let it fill `build.declared.taps`. The base
    model still does what comes before and after its layers. So what enters a part is put in before
    its first layer, and what leaves it is taken out after its last one. calls: of all layers.
    probe: runs the model. Returns the calls of the layers that are there, None for others."""
    if not build.is_divided and not build.taps:
        return list(calls)
    layers = _layers_of(inner, calls)
    count = len(layers)
    indices = build.own_layers(count)
    returns_tuple = _returns_tuple(layers[0], probe)
    for index in set(range(count)) - set(indices):
        layers[index] = AbsentLayer(returns_tuple)
    for depth in build.taps:
        if depth in indices or depth == indices.stop < count:
            layers[depth].register_forward_pre_hook(_keep_input(build.declared.taps, depth))
        elif depth == count == indices.stop:
            layers[-1].register_forward_hook(_keep_output(build.declared.taps, depth))
    passed: dict[str, Tensor] = {}
    if indices.start > 0:
        inner.register_forward_pre_hook(
            lambda module, args, kwargs: passed.update(first=kwargs["inputs_embeds"]),
            with_kwargs=True,
        )
        layers[indices.start].register_forward_pre_hook(
            lambda module, args: (passed["first"], *args[1:])
        )
    if indices.stop < count:
        layers[indices.stop].register_forward_pre_hook(
            lambda module, args: passed.update(last=args[0])
        )
        inner.register_forward_hook(lambda module, args, output: _replaced(output, passed["last"]))
    return [call if index in indices else None for index, call in enumerate(calls)]


class AbsentLayer(nn.Module):
    """Takes the place of a layer that is in another part."""

    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden,) if self.returns_tuple else hidden


def _layers_of(inner: nn.Module, calls: Sequence[AttentionCall]) -> nn.ModuleList:
    """Return the list whose modules make one of these calls each."""
    for layers in inner.modules():
        if isinstance(layers, nn.ModuleList) and len(layers) == len(calls):
            pairs = zip(layers, calls, strict=True)
            if all(call.module in set(layer.modules()) for layer, call in pairs):
                return layers
    raise ModelError(f"{type(inner).__name__} has no list of layers, so it cannot be divided")


def _returns_tuple(layer: nn.Module, probe: Callable[[], object]) -> bool:
    results: list[bool] = []
    hook = layer.register_forward_hook(
        lambda module, args, output: results.append(isinstance(output, tuple))
    )
    probe()
    hook.remove()
    return results[0]


def _keep_input(taps: dict[int, Tensor], depth: int) -> Callable[..., None]:
    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        taps[depth] = args[0][0].clone()

    return keep


def _keep_output(taps: dict[int, Tensor], depth: int) -> Callable[..., None]:
    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        taps[depth] = hidden[0].clone()

    return keep


def _replaced(output: Any, hidden: Tensor) -> Any:
    output.last_hidden_state = hidden
    return output

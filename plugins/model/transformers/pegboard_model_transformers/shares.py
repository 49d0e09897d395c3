"""How ranks divide the linear modules of a transformers model: as its tensor parallel plan says.

A plan says of paths such as "layers.*.mlp.up_proj" whether a module is divided by its outputs
("colwise") or by its inputs ("rowwise"). With other words, modules stay whole on all ranks: some of
them exchange more than they save. Attention is divided if all of its modules in the plan are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from pegboard.errors import ModelError
from pegboard.layers.shards import Group, Span, scaled
from pegboard_model_transformers.probe import AttentionCall

WHOLE = {"mla_kv_a_proj", "replicated_with_grad_allreduce"}
"""Modules that stay whole where attention is divided."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of a linear module. rows: of its outputs; None = all. is_summed: it has a
    part of the inputs, and the ranks add up their results. heads: see `pegboard.layers.Linear`."""

    rows: Span | None = None
    is_summed: bool = False
    heads: tuple[int, int, int] | None = None


class Shares:
    """The shares of one rank. Raises ModelError if there are several ranks, and transformers has no
    plan for the model. calls: of attention, None for layers that are not there."""

    def __init__(self, group: Group, model: Any, calls: Iterable[AttentionCall | None]) -> None:
        self.group = group
        if group.size == 1:
            return
        plan = getattr(model.config, "base_model_tp_plan", None)
        if not plan:
            raise ModelError(
                f"transformers has no tensor parallel plan for {type(model).__name__}, so ranks "
                "cannot divide it; set tensor_parallel_size=1"
            )
        paths = {id(module): path for path, module in model.named_modules()}
        self.start = f"{paths[id(model.base_model)]}." if model.base_model is not model else ""
        self.plan = [
            (re.compile(re.escape(path).replace(r"\*", r"[^.]+")), style)
            for path, style in plan.items()
        ]
        self.calls = {paths[id(call.module)]: call for call in calls if call is not None}
        self.whole = {path for path, call in self.calls.items() if not self._divides(path, call)}

    def of(self, path: str, linear: nn.Linear) -> Share:
        """Return the share of the linear module at this path."""
        if self.group.size == 1:
            return Share()
        style = self._style(path)
        owner = next((each for each in self.calls if path.startswith(f"{each}.")), None)
        if style not in ("colwise", "rowwise") or owner in self.whole:
            return Share()
        if owner is None:
            rows = self.group.share(linear.out_features) if style == "colwise" else None
            return Share(rows, rows is None)
        call = self.calls[owner]
        if style == "colwise":
            return Share(self._heads(linear.out_features, call))
        each = linear.in_features // call.num_heads
        return Share(is_summed=True, heads=(call.num_heads, call.num_kv_heads, each))

    def attention(self, path: str) -> Group:
        """Return the ranks that divide the heads of the attention module at this path."""
        return Group() if self.group.size == 1 or path in self.whole else self.group

    def _style(self, path: str) -> str | None:
        inside = path.removeprefix(self.start)
        return next((style for pattern, style in self.plan if pattern.fullmatch(inside)), None)

    def _divides(self, path: str, call: AttentionCall) -> bool:
        """Return whether the plan divides all that this attention module computes by heads."""
        names = [name for name, _ in call.module.named_modules() if name]
        names += [name for name, _ in call.module.named_parameters() if name != call.sinks]
        styles = {name: self._style(f"{path}.{name}") for name in names}
        linears = {
            name: module
            for name, module in call.module.named_modules()
            if type(module) is nn.Linear
        }
        divided = {name: style for name, style in styles.items() if style and style not in WHOLE}
        sizes = {"colwise": "out_features", "rowwise": "in_features"}
        return {*divided.values()} == {*sizes} and all(
            name in linears
            and style in sizes
            and any(getattr(linears[name], sizes[style]) % count == 0 for count in _counts(call))
            for name, style in divided.items()
        )

    def _heads(self, count: int, call: AttentionCall) -> Span:
        """Return the rank's part of `count` outputs, which are those of heads or of KV heads."""
        heads, kv_heads = self.group.heads(call.num_heads, call.num_kv_heads)
        of_keys = {call.num_kv_heads * dim for dim in (call.head_dim, call.value_dim)}
        of_queries = {call.num_heads * dim for dim in (call.head_dim, call.value_dim)}
        if count % call.num_heads or count in of_keys - of_queries:
            return scaled(kv_heads, count // call.num_kv_heads)
        return scaled(heads, count // call.num_heads)


def _counts(call: AttentionCall) -> tuple[int, int]:
    return call.num_heads, call.num_kv_heads

"""Finds out how a transformers model attends, with one run on the meta device, on which nothing is
computed.

transformers looks up attention in one registry of functions and masks in another
(`AttentionInterface`, `AttentionMaskInterface`). During the probe, functions of this module replace
both. They only record what each attention module passes in, and which keys its mask lets a query
see. Nothing is guessed from configs or class names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface

from pegboard.errors import ModelError
from pegboard_model_transformers.rotary import RotaryCall, rotary_call

PROBE = "pegboard_probe"
SERVE = "pegboard"
PAGED = "paged_attention"
"""Name of the attribute of an attention module that holds Pegboard's layer."""
PROBE_TOKENS = 3
PASSIVE_ARGUMENTS = {
    "position_ids",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "use_cache",
    "is_causal",
    "past_key_values",
    "return_dict",
    "output_router_logits",
    "deterministic",
    "position_embeddings",
}
"""Keyword arguments of an attention call that do not change its result."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Replaces an attention mask in the probe. window: a query sees the last `window` keys, or of
    models that attend both ways so many to each side; None = all of these keys. chunk: it sees the
    earlier keys of its chunk of so many positions. trouble: why the mask cannot be served. Models
    also create masks that they do not use, so `trouble` counts only if an attention module receives
    the mask."""

    window: int | None = None
    chunk: int | None = None
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one attention module needs. Sizes are as in `pegboard.layers.Attention`. sinks: the name
    of the module's parameter with a sink for each head."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float | None
    window: int | None
    soft_cap: float | None
    chunk: int | None = None
    sinks: str | None = None


@dataclass(slots=True)
class Notes:
    """What a probe has found so far. both_ways: each token must attend to all others, not only to
    those before it. position_ids: the input. calls: of attention. rotary: of rotary modules.
    places: the tables in which positions are looked up."""

    name: str
    both_ways: bool
    position_ids: Tensor
    calls: list[AttentionCall] = field(default_factory=list)
    rotary: list[RotaryCall] = field(default_factory=list)
    places: list[nn.Embedding] = field(default_factory=list)

    def look(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note a call of a rotary module or of a table of positions. A forward hook of all
        modules."""
        if type(module) is nn.Embedding and args and args[0] is self.position_ids:
            self.places.append(module)
        call = rotary_call(module, args, kwargs, output)
        if call is not None:
            self.rotary.append(call)


_current: list[Notes] = []


class ProbedLinear(nn.Linear):
    """Replaces the class of the linear modules in the probe. They will be Pegboard's layers, whose
    weights have other formats, so a model that reads a weight itself cannot be served."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        raise ModelError(
            f"{_current[-1].name} reads the weight of a linear module itself, so it needs its own "
            "model plugin"
        )

    def forward(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.out_features)


def run_probe(model: Any, inner: nn.Module, dtype: torch.dtype, both_ways: bool = False) -> Notes:
    """Return what one forward of `inner` calls, in order. both_ways: its tokens must attend to
    those after them, too. Raises ModelError if the model cannot be run this way."""
    name = type(model).__name__
    notes = Notes(name, both_ways, torch.arange(PROBE_TOKENS, device="meta")[None])
    hidden_size = model.get_input_embeddings().embedding_dim
    experts = model.get_experts_implementation()
    linears = [module for module in inner.modules() if type(module) is nn.Linear]
    hooks = [
        module.register_forward_hook(notes.look, with_kwargs=True) for module in inner.modules()
    ]
    _current.append(notes)
    try:
        for linear in linears:
            linear.__class__ = ProbedLinear
        # plain products, which support all types on the meta device
        model.set_experts_implementation("batched_mm")
        with torch.no_grad():
            inner(
                inputs_embeds=torch.empty(1, PROBE_TOKENS, hidden_size, dtype=dtype, device="meta"),
                attention_mask=torch.ones(1, PROBE_TOKENS, dtype=torch.bool, device="meta"),
                position_ids=notes.position_ids,
                use_cache=False,
            )
    except ModelError:
        raise
    except Exception as error:
        # third-party modeling code can raise anything; every error means that the model is
        # unsupported
        raise ModelError(
            f"{name} cannot run on Pegboard's KV cache: a trial run failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for linear in linears:
            linear.__class__ = nn.Linear
        _current.pop()
        for hook in hooks:
            hook.remove()
        model.set_experts_implementation(experts)
    return notes


def _note_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Record an attention call: query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv] → [1, T,
    H, Dv], which is not computed."""
    notes = _current[-1]
    dropout = kwargs.pop("dropout", 0.0)
    window = kwargs.pop("sliding_window", None)
    soft_cap = kwargs.pop("softcap", None)
    sinks = _sinks_name(module, kwargs.pop("s_aux", None), notes.name)
    chunk = None
    is_causal = kwargs.get("is_causal") is not False
    is_causal = is_causal and getattr(module, "is_causal", True) is not False
    if not is_causal and not notes.both_ways:
        raise ModelError(
            f"{notes.name} has attention that is not causal, so it generates no text; to make "
            "vectors with it: --hf-overrides.architectures '[\"TransformersEncoderModel\"]', or "
            "TransformersEncoderForSequenceClassification for classes"
        )
    extra = sorted(
        name
        for name, value in kwargs.items()
        if value is not None and name not in PASSIVE_ARGUMENTS
    )
    if extra or dropout:
        raise ModelError(
            f"{notes.name} has attention with {', '.join(extra) or 'dropout'}, which the paged "
            "attention layer does not support"
        )
    if query.shape[2] != PROBE_TOKENS or key.shape[2] != PROBE_TOKENS:
        raise ModelError(
            f"{notes.name} attends over {key.shape[2]} keys for {PROBE_TOKENS} tokens; only "
            "self-attention can be served"
        )
    if isinstance(attention_mask, Sight):
        if attention_mask.trouble:
            raise ModelError(f"{notes.name} {attention_mask.trouble}")
        window = attention_mask.window
        chunk = attention_mask.chunk
    elif notes.both_ways and (is_causal or window is not None):
        raise ModelError(
            f"{notes.name} lets no mask say which tokens attend to those after them, so it cannot "
            "be served as a model whose tokens attend to all of the prompt"
        )
    elif attention_mask is not None and (
        not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2
    ):
        raise ModelError(
            f"{notes.name} makes its own attention masks, which the paged attention layer cannot "
            "apply"
        )
    head_dim = query.shape[3]
    value_dim = value.shape[3]
    notes.calls.append(
        AttentionCall(
            module,
            query.shape[1],
            key.shape[1],
            head_dim,
            value_dim,
            scaling,
            window,
            soft_cap,
            chunk,
            sinks,
        )
    )
    return query.new_empty(1, PROBE_TOKENS, query.shape[1], value_dim), None


def _sinks_name(module: nn.Module, sinks: Any, model: str) -> str | None:
    """Return the name of the parameter that an attention module gives as its sinks, or None."""
    if sinks is None:
        return None
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is sinks:
            return name
    raise ModelError(
        f"{model} computes its attention sinks (s_aux); only those that are a parameter of the "
        "attention module can be served"
    )


class WithoutPadding(TorchFunctionMode):
    """Takes zeros for tensors on the meta device, which have no values. Mask functions ask them how
    much padding a row has."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tree_map(_as_zeros, (args, dict(kwargs or {})))
        return func(*given[0], **given[1])


def _as_zeros(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type == "meta":
        return torch.zeros(value.shape, dtype=value.dtype)
    return value


def _note_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **kwargs: Any
) -> Sight:
    """Find out which keys a mask function lets a query see. Tested are the edges of a causal mask,
    of a window and of a chunk. In the probe of a model that attends both ways, the edges are those
    to both sides."""

    def sees(query: int, key: int) -> bool:
        with WithoutPadding():
            return bool(mask_function(0, 0, torch.tensor(query), torch.tensor(key)))

    if _current[-1].both_ways:
        return _both_sides(sees, local_size)
    if sees(5, 6) or not sees(5, 5):
        return Sight(trouble="uses a mask that is not causal; only decoders can be served")
    if local_size is None:
        return (
            Sight()
            if sees(100_000, 0)
            else Sight(trouble="uses a mask that hides earlier tokens, but is not a sliding window")
        )
    size = local_size
    far = 3 * size + 1
    if sees(far, far - size + 1) and not sees(far, far - size) and sees(far + 1, far - size + 2):
        return Sight(size)
    last = 3 * size - 1
    if sees(last, 2 * size) and not sees(last, 2 * size - 1) and not sees(3 * size, last):
        return Sight(chunk=size)
    return Sight(
        trouble="uses a mask that hides earlier tokens, but is neither a sliding window nor chunks"
    )


def _both_sides(sees: Callable[[int, int], bool], size: int | None) -> Sight:
    """Return the same for a mask of which both sides count. size: that of the config's window."""
    far = 100_000
    if sees(0, far) and sees(far, 0):
        return Sight()
    for reach in () if size is None else (size, size - 1, size // 2):
        near = [sees(far, far + sign * reach) for sign in (-1, 1)]
        beyond = [sees(far, far + sign * (reach + 1)) for sign in (-1, 1)]
        if all(near) and not any(beyond):
            return Sight(reach)
    return Sight(
        trouble="uses a mask that hides tokens, but is not a window with two equal sides; only "
        "models whose tokens attend to all of the prompt can be served like this"
    )


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention of a served step. Everything else was set when the layer was declared."""
    out = module.paged_attention(*(x[0].transpose(0, 1).contiguous() for x in (query, key, value)))
    return out.view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(PROBE, _note_attention)
AttentionMaskInterface.register(PROBE, _note_mask)
AttentionInterface.register(SERVE, _attend)  # without a mask function, transformers makes no masks

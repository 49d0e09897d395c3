"""Any decoder-only architecture, run with transformers' modules on Pegboard's attention, linear
layers, embedding and head.

loading   Attention is declared after a trial run (see `probe`). nn.Linear modules, stacked experts,
the token embedding and the
          head are replaced. All other tensors are loaded by name.
step      embed → the base model's forward over inputs_embeds [1, T, hidden] → the path of the head
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING,
)

from pegboard.errors import ModelError
from pegboard.layers import Build, Embedding
from pegboard_model_transformers.depths import divide
from pegboard_model_transformers.modules import (
    EXPERT_TENSORS,
    ModuleAttention,
    ModuleEmbedding,
    ModuleExperts,
    ModuleHead,
    ModuleLinear,
    ModuleTensors,
    expert_activation,
)
from pegboard_model_transformers.names import Names
from pegboard_model_transformers.probe import (
    PAGED,
    PROBE,
    SERVE,
    AttentionCall,
    Notes,
    run_probe,
)
from pegboard_model_transformers.rotary import ModuleRotary, RotaryCall
from pegboard_model_transformers.shares import Shares

POOLING = (
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForMaskedLM",
    "ForPreTraining",
    "ForSequenceEmbedding",
    "ForEmbedding",
    "ForReward",
    "ForRetrieval",
    "ForImageClassification",
    "Encoder",
)
"""How the names of classes end whose states are not those of a causal language model."""


class TransformersModel(nn.Module):
    """[T] token ids → [T, vocab] logits, in the stages that core calls: embed, forward, logits."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        if build.rope_style != "halves":
            raise ModelError(
                "the checkpoint stores rotary channels as pairs, but transformers' modules need "
                "halves; use a safetensors checkpoint"
            )
        dtype = getattr(torch, build.dtype)
        model = make_model(config, dtype, build.sees_all)
        refuse_counting(model.config, build.max_positions)
        self.embedding, notes = declare_model(build, model, dtype)
        self.first_position = first_position(notes, build.max_positions)
        self.model = model
        self.inner = model.base_model
        self.head = with_bare_head(model, Passthrough())

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(input_ids)
        return hidden

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        if self.first_position:
            positions = positions + self.first_position
        final: Tensor = self.inner(
            inputs_embeds=hidden[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state
        return final[0]

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()


def declare_model(
    build: Build, model: Any, dtype: torch.dtype, apart: Sequence[str] | None = None
) -> tuple[Embedding, Notes]:
    """Run the probe, and declare the layers of a model on the meta device. apart: the paths of the
    modules that compute other rows than the step's; None = the model has a head for text. Returns
    the token embedding, and what the probe has found."""
    inner = model.base_model
    notes = run_probe(model, inner, dtype, build.sees_all)
    check_attention(model, notes.calls)
    part_calls = divide(
        build, inner, notes.calls, lambda: run_probe(model, inner, dtype, build.sees_all)
    )
    shares = Shares(build.tensor, model, part_calls)
    names = Names(model)
    declare_attention(build, model, part_calls, shares, names)
    make_buffers(model, build.device)
    declare_rotary(build, model, notes.rotary)
    embedding = declare_layers(build, model, shares, names, apart)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = SERVE
    return embedding, notes


def make_model(config: Mapping[str, Any], dtype: torch.dtype, both_ways: bool = False) -> Any:
    """Return the causal language model on the meta device. Of a multimodal config, only the text
    part is used. both_ways: its tokens attend to those after them, too, also if the config does not
    say so."""
    whole = parsed_config(config)
    model_type = whole.model_type
    refuse_pooling(config.get("architectures") or (), model_type)
    parsed = whole.get_text_config(decoder=True)
    if getattr(whole, "tie_word_embeddings", False):
        parsed.tie_word_embeddings = True
    name = type(parsed).__name__
    if parsed.is_encoder_decoder:
        raise ModelError(
            f"{model_type} is an encoder-decoder model ({name}); only decoder-only models can be "
            "served"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(parsed), None)
    if model_class is None:
        refuse_attention(MODEL_MAPPING.get(type(parsed), None))
        raise ModelError(
            f"transformers has no causal language model for {model_type} ({name}). If it is an "
            "encoder that makes vectors: --hf-overrides.architectures "
            "'[\"TransformersEncoderModel\"]'"
        )
    refuse_attention(model_class)
    refuse_config(parsed, model_class.__name__)
    parsed.use_cache = False
    if both_ways and not getattr(parsed, "use_bidirectional_attention", False):
        parsed.is_causal = False
    model = built_on_meta(model_class, parsed, dtype, attn_implementation=PROBE)
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"  # Llama 4's is that of a model that also reads images
    return model


def parsed_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' config. Raises ModelError if it knows no such model or refuses it."""
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"transformers does not know model_type {model_type!r}, and no plugin for it is "
            "installed"
        )
    try:
        return AutoConfig.for_model(
            model_type, **{name: value for name, value in config.items() if name != "model_type"}
        )
    except Exception as error:  # every check of a config class raises something else
        raise ModelError(
            f"transformers refuses the config of this {model_type} model: {error}"
        ) from error


def built_on_meta(kind: Any, parsed: Any, dtype: torch.dtype, **how: Any) -> Any:
    """Return a model of this class on the meta device. Raises ModelError."""
    try:
        with torch.device("meta"):
            model = kind._from_config(parsed, dtype=dtype, **how)
    except Exception as error:
        # modeling code can raise anything for a config that fits together badly
        raise ModelError(
            f"{kind.__name__} cannot be built from its config: {type(error).__name__}: {error}"
        ) from error
    return model.eval()


def refuse_pooling(architectures: Sequence[str], model_type: str) -> None:
    """Raise ModelError for a model whose output is not text: its checkpoint has no head that
    predicts tokens, or another one."""
    for name in architectures:
        if name.endswith(POOLING) and not name.endswith("LMHeadModel"):
            advice = ""
            if causal := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type):
                advice = (
                    f". If the checkpoint also has the head of {causal}: "
                    f"--hf-overrides.architectures '[\"{causal}\"]'"
                )
            raise ModelError(
                f"{name} computes embeddings, scores or classes and no text; no installed model "
                f"plugin serves it{advice}"
            )


def refuse_attention(kind: Any) -> None:
    """Raise ModelError for a class of models whose attention transformers does not let others
    compute. kind: None = there is no class."""
    if kind is not None and not kind._supports_attention_backend:
        raise ModelError(
            f"{kind.__name__} computes attention (or a recurrent state) in a way that cannot be "
            "replaced, for example with scores that depend on the distance of two tokens, so it "
            "cannot use Pegboard's attention; it needs its own model plugin"
        )


def refuse_config(config: Any, name: str) -> None:
    """Raise ModelError for models that would run, but whose requests would affect each other."""
    if getattr(config, "num_kv_shared_layers", 0):
        raise ModelError(
            f"{name} shares keys and values between layers, which only its own model plugin can "
            "support"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    rules = [rule for rule in parameters.values() if isinstance(rule, Mapping)] or [parameters]
    for rule in rules:
        kind = rule.get("rope_type", "default")
        original = rule.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind == "dynamic" or (kind == "longrope" and config.max_position_embeddings > original):
            advice = (
                "rope_parameters of rope_type 'default'"
                if kind == "dynamic"
                else f"max_position_embeddings={original}"
            )
            raise ModelError(
                f"{name} uses {kind!r} rotary scaling, which transformers recomputes from the "
                "longest request of a step, so requests would affect each other. To serve it "
                f"within its original length use hf_overrides with {advice}"
            )


def refuse_counting(config: Any, length: int | None) -> None:
    """Raise ModelError if attention depends on positions that the modules count from the start of a
    step. length: of the longest request, in tokens; None = not known."""
    flat = getattr(config, "floor_scale", 0)
    longest = length or config.max_position_embeddings
    if getattr(config, "attn_temperature_tuning", False) and longest >= flat:
        raise ModelError(
            f"this {config.model_type} model scales queries from position {flat} on "
            "(attn_temperature_tuning), and transformers' modules count positions from the start "
            f"of a step; set max_model_len below {flat}, or use its own model plugin"
        )


def check_attention(model: Any, calls: list[AttentionCall]) -> None:
    """Raise ModelError unless each layer attends once."""
    name = type(model).__name__
    num_layers = model.config.num_hidden_layers
    if len(calls) != num_layers or len({id(call.module) for call in calls}) != num_layers:
        raise ModelError(
            f"{name} attends {len(calls)} times in {num_layers} layers; models whose layers do "
            "not each attend exactly once, such as hybrids with a recurrent state, need their "
            "own plugin"
        )


def declare_attention(
    build: Build, model: Any, calls: Sequence[AttentionCall | None], shares: Shares, names: Names
) -> None:
    """Declare one paged attention layer for each attention module, which holds the module's sinks.
    None = the layer is not there."""
    paths = {id(module): path for path, module in model.named_modules()}
    for index, call in enumerate(calls):
        if call is None:
            continue
        path = paths[id(call.module)]
        layer = ModuleAttention(
            replace(build.at(path), tensor=shares.attention(path)),
            index,
            call.num_heads,
            call.num_kv_heads,
            call.head_dim,
            scale=call.scale,
            window=call.window,
            soft_cap=call.soft_cap,
            value_dim=call.value_dim if call.value_dim != call.head_dim else None,
            chunk=call.chunk,
            names=names,
            sinks=call.sinks,
        )
        if call.sinks is not None:
            setattr(call.module, call.sinks, None)
            names.held.add(f"{path}.{call.sinks}")
        setattr(call.module, PAGED, layer)


def declare_rotary(build: Build, model: Any, calls: Sequence[RotaryCall]) -> None:
    """Let tables take the place of the rotary modules."""
    length = model.config.max_position_embeddings
    paths = {id(module): path for path, module in model.named_modules()}
    for path in dict.fromkeys(paths[id(call.module)] for call in calls):
        its_calls = [call for call in calls if paths[id(call.module)] == path]
        ModuleRotary(build.at(path), its_calls, length)


def declare_layers(
    build: Build, model: Any, shares: Shares, names: Names, apart: Sequence[str] | None
) -> Embedding:
    """Replace linear modules, stacked experts, the token embedding and the head by Pegboard's
    layers, and allocate all other tensors. apart: see `declare_model`. Returns the embedding."""
    embedding = model.get_input_embeddings()
    name = type(model).__name__
    if type(embedding) is not nn.Embedding and not hasattr(embedding, "embed_scale"):
        raise ModelError(
            f"{name} has the token embedding {type(embedding).__name__}, which does more than "
            "look up and scale rows"
        )
    paths = {id(module): path for path, module in model.named_modules()}
    own_embedding = ModuleEmbedding(build.at(paths[id(embedding)]), embedding, names)
    replaced: dict[str, nn.Module] = {paths[id(embedding)]: own_embedding}
    tied = set(model.all_tied_weights_keys)
    if apart is None:
        path, head = text_head(model)
        is_tied = f"{path}.weight" in tied
        tied.discard(f"{path}.weight")
        replaced[path] = ModuleHead(build.at(path), head, names, own_embedding if is_tied else None)
    if tied:
        raise ModelError(
            f"{name} ties tensors other than its output head: {', '.join(sorted(tied)[:4])}"
        )
    lists_experts = names.experts_are_listed()
    for path, module in model.named_modules():
        if type(module) is nn.Linear and path not in replaced:
            takes = build.without_adapters() if is_below(path, apart or ()) else build
            replaced[path] = ModuleLinear(takes.at(path), module, names, shares.of(path, module))
        elif lists_experts and (activation := expert_activation(module)) is not None:
            replaced[path] = ModuleExperts(build.at(path), module, activation, names)
    for path, layer in replaced.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
    held = {f"{path}.{kind}" for path in replaced for kind in ("weight", "bias", *EXPERT_TENSORS)}
    held |= names.held
    ModuleTensors(build, model, [target for target in names.targets if target not in held], names)
    return own_embedding


def text_head(model: Any) -> tuple[str, nn.Linear]:
    """Return the head that predicts tokens, and its path."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(
            f"{type(model).__name__} has the output head {type(head).__name__}; only a linear one "
            "can be served"
        )
    return next(path for path, module in model.named_modules() if module is head), head


def is_below(path: str, roots: Sequence[str]) -> bool:
    """Return whether one of these modules is at this path, or has a part there."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def first_position(notes: Notes, longest: int | None) -> int:
    """Return the row of the table of positions that position 0 has: those before it are for
    padding. longest: the most tokens of a prompt; None = not known. Raises ModelError if there are
    not so many rows."""
    rows = [
        (0 if table.padding_idx is None else table.padding_idx + 1, table.num_embeddings)
        for table in notes.places
    ]
    if len({first for first, _ in rows}) > 1:
        raise ModelError(f"{notes.name} looks up positions in several ways; it cannot be served")
    for first, count in rows:
        if (longest or 0) > count - first:
            raise ModelError(
                f"the model has positions for {count - first} tokens; set max_model_len to at most "
                f"{count - first}"
            )
    return rows[0][0] if rows else 0


def make_buffers(model: Any, device: str) -> None:
    """Fill non-persistent buffers (rotary frequencies, embedding scales) with transformers'
    initialization, because checkpoints do not contain them."""
    with torch.no_grad():
        for owner, module in with_owners(model):
            names = [
                name
                for name in module._non_persistent_buffers_set
                if module._buffers.get(name) is not None
            ]
            if not names:
                continue
            for name in names:
                module._buffers[name] = torch.zeros_like(module._buffers[name], device="cpu")
            owner._init_weights(module)
            for name in names:
                module._buffers[name] = module._buffers[name].to(device)


def with_owners(model: Any) -> Iterator[tuple[Any, nn.Module]]:
    """Yield each module with the innermost model that it is a part of, which can initialize it."""
    pairs = [(model, model)]
    while pairs:
        owner, module = pairs.pop()
        yield owner, module
        pairs += [
            (child if isinstance(child, PreTrainedModel) else owner, child)
            for child in module.children()
        ]


class FinalHidden(BaseModelOutputWithPast):
    """A base model's output that holds only the last hidden state. Every other field that an
    architecture may read is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Passthrough(nn.Module):
    """Replaces the base model: returns its input embeddings as the final hidden state."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> FinalHidden:
        return FinalHidden(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> nn.Module:
        """Some heads access the decoder through the base model (OPT)."""
        return self


def with_bare_head(model: Any, stand_in: nn.Module) -> Any:
    """Return the same model with another module in the place of its base model. Its forward is the
    path of the head, including any scaling or capping of logits. It shares all other modules."""
    bare = copy.copy(model)
    bare._modules = {**model._modules, model.base_model_prefix: stand_in}
    return bare

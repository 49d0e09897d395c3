"""A model that a worker has loaded: its layers and weights, its attention, and its recorded
stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from pegboard.data.pooling_params import Pooling
from pegboard.errors import ConfigError, ModelError
from pegboard.installed import Entry
from pegboard.interfaces.attention import (
    AttentionInputs,
    AttentionNeed,
    AttentionSetup,
    KVCacheSpec,
    KVPlan,
    State,
)
from pegboard.interfaces.kv_connector import STATES
from pegboard.interfaces.platform import Replay, Trait
from pegboard.interfaces.quantization import QuantizationMethod, QuantizationNeed, QuantizationSetup
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    ShareFiles,
    WeightLoaderSetup,
)
from pegboard.layers import Build, Experts, Layer, read
from pegboard.layers.build import LoRALimits, WeightLayer
from pegboard.layers.classes import ClassHead
from pegboard.log import get_logger
from pegboard.ops import AdapterRows
from pegboard.plugins.defaults import default_name
from pegboard.worker.attention_groups import AttentionGroups
from pegboard.worker.borders import Receive
from pegboard.worker.model_loader import (
    check_tensors,
    fill_layers,
    fill_or_restore,
    repack_cache,
    wanted_of,
)
from pegboard.worker.parts import WorkerSetup
from pegboard.worker.recordings import mode_of
from pegboard.worker.stages import TRAITS, Embed, Stages
from pegboard.worker.step_inputs import InputBuilder, StepInputs

log = get_logger(__name__)

INCOMPLETE = "incomplete"

STATE_EVERY = 512
"""Tokens between two states that the prefix cache keeps, if mamba_block_size is not set."""


class LoadedModel:
    """The order of calls is: constructor → load → bind → connect → steps. The constructor builds
    the model without weights, chooses its attention backends and asks its layers for the tensors
    that they need. Raises ConfigError, ModelError or PluginError.

    first_layer: added to the model's layer indices in the KV cache, which all models of a worker
    share. quantization: the user's choice for a plain checkpoint. lora: None = the model takes no
    adapters. layers, taps, target: see `Build`. pooling: what the engine makes of prompts; None =
    it generates text.
    """

    stages: Stages
    """Set by `connect`."""
    classes: ClassHead | None = None
    """Computes values of classes instead of logits. None = the model has no such head."""
    received: str = ""
    """A name of the weights that a trainer has sent, or INCOMPLETE. "" = they are those of the
    checkpoint."""
    given: Tensor | None = None
    """[most tokens of a step, width], given with each token. None = the model is given nothing."""

    def __init__(
        self,
        setup: WorkerSetup,
        checkpoint: Checkpoint,
        *,
        first_layer: int = 0,
        lora: LoRALimits | None = None,
        layers: range | None = None,
        taps: tuple[int, ...] = (),
        quantization: str | None = None,
        target: Any = None,
        pooling: Pooling | None = None,
    ) -> None:
        self.setup = setup
        self.checkpoint = checkpoint
        self.first_layer = first_layer
        self.inputs: InputBuilder | None = None
        self.replaced: Checkpoint | None = None
        self.quantization = quantization
        self.build = self._build(lora, layers, taps, target, pooling)
        self.model: Any
        self.entry, self.model = self._model(
            checkpoint.architectures, checkpoint.config, self.build
        )
        if self.build.stage.count > 1 and not self.build.declared.has_stack:
            raise ConfigError(
                f"{self.entry.id} has no stack of layers to divide; use pipeline_parallel_size=1"
            )
        has_experts = any(isinstance(layer, Experts) for layer in self.layers)
        if pooling is not None and pooling.head and self.build.stage.is_last:
            self.classes = ClassHead(self.build, pooling.head, len(pooling.labels))
        is_whole = self.build.stage.count == 1 and not first_layer
        if self.build.tensor.placement and is_whole and not has_experts:
            raise ConfigError(f"{self.entry.id} has no experts; remove enable_expert_parallel")
        self.attention = self._attention()
        self.declared = {layer: layer.declare(checkpoint.tensors) for layer in self.layers}

    @property
    def layers(self) -> list[Layer]:
        """The layers, in the order in which they were built."""
        return self.build.declared.layers

    # --- build ------------------------------------------------------------------------------------

    def _build(
        self,
        lora: LoRALimits | None,
        layers: range | None,
        taps: tuple[int, ...],
        target: Any,
        pooling: Pooling | None,
    ) -> Build:
        config = self.setup.config
        checkpoint = self.checkpoint
        asked = self.quantization
        quantization = self._quantization(checkpoint.quantization or {}, asked)
        plain_name = default_name("quantization")
        is_plain = not checkpoint.quantization and asked in (None, plain_name)
        return Build(
            dtype=self.setup.activations,
            device=self.setup.device.name,
            quantization=quantization,
            plain=quantization if is_plain else self._quantization({}, plain_name),
            kernels=self.setup.kernels,
            plain_dtype=config.dtype,
            rope_style=checkpoint.rope_style,
            max_positions=self.setup.limits.max_model_len,
            layers=layers,
            taps=taps,
            lora=lora,
            tensor=self.setup.ranks.tensor,
            stage=self.setup.ranks.stage,
            engines=self.setup.ranks.engines,
            stored=checkpoint.tensors.keys(),
            models=self._language_model,
            target=target,
            has_text_head=pooling is None or pooling.head is None,
            sees_all=pooling is not None and pooling.sees_all,
            lora_rows=lambda: self._adapter_rows(False),
            # the head of a model that pools computes other rows than those that a step samples
            lora_head_rows=None if pooling is not None else lambda: self._adapter_rows(True),
        )

    def _language_model(self, config: Mapping[str, Any], build: Build) -> Any:
        """Build a part of the model that has an architecture of its own."""
        return self._model(tuple(read(config, "architectures", list[str]) or ()), config, build)[1]

    def _model(
        self, architectures: tuple[str, ...], config: Mapping[str, Any], build: Build
    ) -> tuple[Entry, Any]:
        """Build a model of one of these architectures. Return its plugin as well."""
        registry = self.setup.registry
        need = Need(
            platform=self.setup.platform_name, batch_invariant=self.setup.config.batch_invariant
        )
        entry = registry.choose("model", need, keys=architectures).require()
        if build.tensor.size > 1 and "tensor_parallel" not in registry.spec(entry).flags:
            raise ConfigError(
                f"{entry.id} cannot divide its layers among ranks; use tensor_parallel_size=1"
            )
        return entry, registry.checked(entry, registry.load(entry)(config, build), None)

    def _quantization(self, stored: Any, asked: str | None) -> QuantizationMethod:
        """Return the quantization method that the checkpoint names, or the user's choice for a
        plain checkpoint."""
        setup = self.setup
        name = str(asked or stored.get("quant_method") or default_name("quantization"))
        need = QuantizationNeed(platform=setup.platform_name, dtype=setup.activations)
        entry = setup.registry.choose("quantization", need, explicit=name, key=name).require()
        quantization_setup = QuantizationSetup(
            config=stored,
            dtype=setup.activations,
            device=setup.device.name,
            kernels=setup.kernels,
            repack_cache=repack_cache(setup.config, self.checkpoint),
            plain_dtype=setup.config.dtype,
            rounding=setup.config.activation_quantization,
        )
        return setup.registry.build(entry, quantization_setup)

    def _attention(self) -> AttentionGroups:
        setup = self.setup
        config = setup.config
        declared = self.build.declared
        for name in config.kv_connectors or () if declared.states else ():
            if STATES not in setup.registry.spec(setup.registry.find("kv_connector", name)).flags:
                raise ConfigError(
                    f"the model has layers with states, which the KV connector {name} cannot move; "
                    "remove it from kv_connectors"
                )
        if declared.states and config.spec_method and config.pipeline_parallel_size > 1:
            raise ConfigError(
                "the model has layers with states, and only the last pipeline stage knows the "
                "tokens that are computed again after a wrong draft; set pipeline_parallel_size to "
                "1, or remove spec_method"
            )
        if declared.states and self.build.target is not None:
            raise ConfigError(
                f"{self.checkpoint.path}: the model has layers with states, and a draft model may "
                "have only attention; name another one"
            )
        if declared.states and setup.ranks.context.rows.group.size > 1:
            raise ConfigError(
                "the model has layers with states, which depend on all rows before; set "
                "prefill_context_parallel_size to 1"
            )
        if self.build.sees_all and (
            declared.states or not all(layer.encoder for layer in declared.attention.values())
        ):
            raise ConfigError(
                f"{self.entry.id} has layers whose tokens cannot see those after them, but the "
                "checkpoint's config has is_causal=false or use_bidirectional_attention=true, or "
                "its architecture makes vectors so"
            )
        need = AttentionNeed(
            platform=setup.platform_name,
            dtype=setup.activations,
            kv_dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            block_size=setup.limits.block_size,
            batch_invariant=config.batch_invariant,
        )
        device = setup.device
        attention_setup = AttentionSetup(
            (),
            setup.activations,
            device.name,
            setup.limits,
            device.num_threads,
            setup.kernels,
            config.batch_invariant,
        )
        is_kept = config.enable_prefix_caching or bool(config.kv_connectors)
        every = (config.mamba_block_size or STATE_EVERY) if is_kept else 0
        retain = State(checkpoint_every=every, takes_drafts=config.spec_method is not None)
        states = {
            index: KVCacheSpec(tensors=tensors, retain=retain, unit="request")
            for index, tensors in declared.states.items()
        }
        return AttentionGroups(
            setup.registry,
            declared.attention,
            self.build.quantization,
            need,
            attention_setup,
            config.dtype,
            config.attention_backend,
            setup.ranks.context,
            states,
        )

    # --- weights ----------------------------------------------------------------------------------

    def load(self, checkpoint: Checkpoint | None = None, *, only_finite: bool = False) -> None:
        """Give the layers their weights, for the first time or again. checkpoint: another one of
        the same model. only_finite: NaN and infinity are errors. Raises ModelError."""
        checkpoint = checkpoint or self.checkpoint
        loader = self._loader(checkpoint.format)
        fill_layers(self.declared, loader, checkpoint, only_finite=only_finite)

    def _loader(self, name: str) -> Any:
        setup = self.setup
        decision = setup.registry.choose("weight_loader", Need(), explicit=name)
        place = setup.place
        loader_setup = WeightLoaderSetup(
            setup.config.seed, place.rank, place.ranks, setup.ranks.layout()
        )
        return setup.registry.build(decision.require(), loader_setup)

    def save(self, files: ShareFiles) -> None:
        """Write what this rank reads of the checkpoint, which is read again for this, with a weight
        loader that saves shares. Raises ModelError, and ConfigError if there is none."""
        if self.received:
            raise ModelError(
                "the weights came from a trainer and are in no checkpoint; let it save them"
            )
        registry = self.setup.registry
        entries = registry.entries("weight_loader")
        savers = [entry.name for entry in entries if "shares" in registry.spec(entry).flags]
        if not savers:
            raise ConfigError("no installed weight loader saves what ranks read")
        saver = self._loader(savers[0])
        wanted = wanted_of(self.declared)
        pieces = self._loader(self.checkpoint.format).tensors(self.checkpoint, wanted.values())
        saver.save(self.checkpoint, wanted, pieces, files)

    def update(self, checkpoint: Checkpoint) -> None:
        """Load another checkpoint of the same model. If it cannot be read or has values that are
        not finite, load the last one again. Raises ModelError, and EngineDeadError if the last one
        cannot be read either."""
        self.replaced = None
        check_tensors(self.declared, checkpoint)
        self.received = ""  # what can be restored is the last checkpoint
        fill_or_restore(
            lambda new: self.load(new, only_finite=new is checkpoint), checkpoint, self.checkpoint
        )
        self.replaced = self.checkpoint
        self.checkpoint = checkpoint

    def undo_update(self) -> None:
        """Load the checkpoint before the last update again, if that has succeeded here."""
        if self.replaced is not None:
            self.update(self.replaced)

    def weight_bytes(self) -> int:
        """Return the memory of the loaded weights."""
        weights = [layer.method for layer in self.layers if isinstance(layer, WeightLayer)]
        tensors = [
            tensor for weight in weights if weight is not None for tensor in weight.tensors()
        ]
        return sum(tensor.element_size() * tensor.numel() for tensor in tensors)  # of any layout

    # --- KV cache ---------------------------------------------------------------------------------

    def kv_specs(self) -> dict[int, KVCacheSpec]:
        """Return what each layer stores, by its index in the KV cache."""
        return {self.first_layer + index: spec for index, spec in self.attention.kv_specs().items()}

    def end_layer(self) -> int:
        """Return the first index in the KV cache after those of this model."""
        declared = self.build.declared
        return self.first_layer + 1 + max((*declared.attention, *declared.states), default=-1)

    def item_groups(self, plan: KVPlan) -> set[int]:
        """Return the indices of the KV groups whose layers see items."""
        layers = {
            self.first_layer + index
            for index, layer in self.build.declared.attention.items()
            if layer.sees_items
        }
        return {
            index for index, group in enumerate(plan.groups) if layers.intersection(group.layers)
        }

    def bind(self, plan: KVPlan, views: Mapping[int, Mapping[str, Any]]) -> None:
        """Bind every layer, to this memory of the KV cache. The model may run after `connect`."""
        first = self.first_layer
        indices = range(first, self.end_layer())
        groups = tuple(
            msgspec.structs.replace(
                group, layers=tuple(index - first for index in group.layers if index in indices)
            )
            for group in plan.groups
        )
        local = {index - first: views[index] for index in indices if index in views}
        plan = msgspec.structs.replace(plan, groups=groups)
        self.build.attention.update(self.attention.attach(plan, local))
        self.rebind()

    def calculate_scales(self) -> None:
        """Let the next step set the scales of a KV cache that stores 8-bit floats. Later steps do
        so too, until the model is bound again."""
        if all(layer.k_scale is None for layer in self.attention.layers.values()):
            log.warning(
                "calculate_kv_scales has no effect: the KV cache does not store 8-bit floats"
            )
        self.build.attention.update(self.attention.setting_scales(self.build.attention))
        self.rebind()

    def rebind(self) -> None:
        """Compose every layer's forward again."""
        for layer in self.layers:
            layer.bind()

    # --- steps ------------------------------------------------------------------------------------

    def connect(
        self, inputs: InputBuilder, traits: Sequence[Trait] = TRAITS, max_drafts: int = 0
    ) -> Stages:
        """Read the inputs of steps from these buffers, and from the stage before this one. traits:
        the stages to record. max_drafts: see `Recordings`."""
        self.inputs = inputs
        before = self.setup.ranks.before
        if (width := self.build.declared.given) is not None:
            dtype = getattr(torch, self.build.dtype)
            self.given = torch.zeros(inputs.max_tokens, width, dtype=dtype, device=inputs.device)
        entrance = (
            Embed(self.model, inputs, self.given) if before is None else Receive(before, inputs)
        )
        rows = self.setup.ranks.context.rows
        self.stages = Stages(
            self.model, self.build, inputs, entrance, rows, traits, max_drafts, self.classes
        )
        return self.stages

    def plan(self, inputs: StepInputs) -> None:
        """Give a step to the attention backends."""
        for group, backend in self.attention.backends:
            backend.plan(inputs.groups[group])

    def store_encoded(self, rows: Tensor, steps: Mapping[int, AttentionInputs]) -> None:
        """Write the output of an encoder [n, width] to the KV cache. steps: KV group → where it is
        stored."""
        for group, backend in self.attention.backends:
            if group in steps:
                backend.plan(steps[group])
        self.model.store_encoded(rows)

    def record(self, replay: Replay) -> list[str]:
        """Record the stages, after a first step. Returns the reasons why some of them run eagerly.
        Raises ConfigError if the platform cannot record in the mode that the user wants."""
        whole, outside = mode_of(self.setup.config.recording_mode, replay)
        attention = self.attention
        self.stages.record(
            replay, whole, self.plan, lambda trait: attention.not_replayed(replay.pads, trait)
        )
        if outside is not None:
            bound = dict(self.build.attention)
            self.build.attention.update(attention.outside(bound, outside))
            self.rebind()
            self.stages.record(replay, ("forward",), None, lambda trait: attention.not_in_pieces())
            self.build.attention.update(bound)
            self.rebind()
        return self.stages.recordings.reasons()

    def _adapter_rows(self, is_head: bool) -> AdapterRows | None:
        if (inputs := self.inputs) is None or not inputs.has_adapters:
            return None
        return (inputs.head_adapters if is_head else inputs.adapters).rows

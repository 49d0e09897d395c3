"""Finds the checkpoint tensors for every tensor of a transformers model.

For each architecture, transformers has rules that turn tensors with their names on the hub into
those of its modules. For example, the matrices of several experts become one tensor, or a prefix is
added. This module uses the same rules, so the same checkpoints can be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from pegboard.errors import ModelError

NESTED = ("language_model.", "text_model.")
"""Prefixes of the names of the text model's tensors in a multimodal checkpoint."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor of the model comes from: the names of checkpoint tensors in order, each with
    the converter pattern that matched it. Without a converter there is only one tensor, which is
    used unchanged."""

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    converter: WeightConverter | None


class Names:
    """The sources by name of the module's tensor. They are found once the checkpoint's index is
    known. held: tensors that attention layers hold."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.targets: dict[str, Any] = dict(model.state_dict())
        self.sources: dict[str, Source] | None = None
        self.held: set[str] = set()

    def source(self, target: str, available: Mapping[str, Any]) -> Source:
        """Return the source of `target`. Raises ModelError if the checkpoint has none. An empty
        index (dummy weights) has every tensor."""
        if not available:
            return Source((target,), ("",), None)
        if self.sources is None:
            self.sources = self._match(available)
        if target not in self.sources:
            raise ModelError(
                f"the checkpoint has no tensor for {target!r} of {type(self.model).__name__}"
            )
        return self.sources[target]

    def module_path(self, path: str, available: Mapping[str, Any]) -> str:
        """Return the checkpoint path of the module at `path`. It is derived from the source of the
        module's weight."""
        source = self.source(f"{path}.weight", available)
        if source.converter is not None or not source.names[0].endswith(".weight"):
            raise ModelError(
                f"{path} of {type(self.model).__name__} is stored as {', '.join(source.names)}, "
                "which cannot be converted"
            )
        return source.names[0].removesuffix(".weight")

    def experts_are_listed(self) -> bool:
        """Return whether checkpoints of this architecture have either a module per expert or
        stacked matrices as the module has them, so that Pegboard can read them by itself."""
        operations = [
            operation
            for converter in get_model_conversion_mapping(self.model)
            if isinstance(converter, WeightConverter)
            and any(
                target.endswith(("gate_up_proj", "down_proj"))
                for target in converter.target_patterns
            )
            for operation in converter.operations
        ]
        return all(isinstance(operation, MergeModulelist | Concatenate) for operation in operations)

    def expert_modules(
        self, target: str, available: Mapping[str, Any]
    ) -> tuple[str, tuple[str, ...]]:
        """Return where the checkpoint has the matrices that are stacked in `target`: a path, and
        the names there of each expert's modules, in the order of the rows, or the name of the
        stacked tensor. Raises ModelError if there is no such path."""
        source = self.source(target, available)
        if source.converter is None:
            path, _, module = source.names[0].removesuffix(".weight").rpartition(".")
            return path, (module,)
        parts = {name.removesuffix(".weight").rpartition(".")[::2] for name in source.names}
        paths = {path.rpartition(".")[0] for path, _ in parts}
        modules = [
            pattern.removesuffix(".weight").rpartition(".")[2]
            for pattern in source.converter.source_patterns
        ]
        if len(paths) > 1 or {module for _, module in parts} != set(modules):
            stored = ", ".join(source.names[:4])
            raise ModelError(
                f"{target} of {type(self.model).__name__} is stored as {stored}, which cannot be "
                "converted"
            )
        return paths.pop(), tuple(modules)

    def _match(self, available: Mapping[str, Any]) -> dict[str, Source]:
        transforms = get_model_conversion_mapping(self.model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        prefix = self.model.base_model_prefix
        by_target: dict[str, list[tuple[str, str | None]]] = {}
        modules = {name.rpartition(".")[0] for name in available}
        # a quantized module may have other tensors instead of its weight
        weights = {f"{module}.weight" for module in modules}
        for name in sorted({*available, *weights}, key=dot_natural_key):
            spellings = (name, *(name.replace(prefix, "", 1) for prefix in NESTED))
            for spelling in dict.fromkeys(spellings):
                target, pattern = rename_source_key(
                    spelling, renamings, converters, prefix, self.targets
                )
                if target not in self.targets:
                    target, pattern = rename_source_key(spelling, [], [], prefix, self.targets)
                if target in self.targets:
                    by_target.setdefault(target, []).append((name, pattern))
                    break
        sources = {}
        for target, taken in by_target.items():
            names, patterns = zip(*taken, strict=True)
            if patterns[0] is None:
                sources[target] = Source(names[-1:], ("",), None)
            else:
                sources[target] = Source(names, patterns, by_pattern[patterns[0]])
        return sources

    def convert(self, target: str, source: Source, tensors: Mapping[str, Tensor]) -> Tensor:
        """Build the module's tensor from checkpoint tensors, given by name."""
        if source.converter is None:
            return tensors[source.names[0]]
        converter = deepcopy(source.converter)
        for name, pattern in zip(source.names, source.patterns, strict=True):
            converter.collected_tensors[pattern].append(tensors[name])  # type: ignore[arg-type]
        result = converter.convert(target, model=self.model, config=self.model.config)
        value = result.get(target)
        if isinstance(value, list):
            value = value[0]
        if not isinstance(value, Tensor):
            raise ModelError(
                f"the checkpoint's {', '.join(source.names[:4])} could not be converted to "
                f"{target!r}"
            )
        return value

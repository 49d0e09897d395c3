"""Transforms of activations (`transform_config`), as SpinQuant and QuIP write them.

Transforms of weights (`weight_input`, `weight_output`) were applied when the checkpoint was
written. A transform of a layer's input is computed before the product:

    x · M / √n   with M [n, n], the tensor "<module>.<name of the scheme>_input.weight"; the
    transposed M for an inverse

n is `head_dim` or `block_size`, or else all columns. The entries of a `hadamard` matrix follow from
n, so it needs no tensor. A `random-hadamard` matrix is usually a Hadamard matrix whose rows have
random signs, and is then computed as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard_weights.composed import Hadamard, MatrixTransform, SignedHadamard, Transform
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.stored_weight import Pieces, Reader, floats, module_of
from pegboard_weights.transformed import TransformedReader

OFFLINE = ("weight_input", "weight_output")
TYPES = ("hadamard", "random-hadamard", "random-matrix")


@dataclass(frozen=True, slots=True)
class InputTransform:
    """name: of the scheme. size: rows of the matrix, None = all columns of the weight."""

    name: str
    type: str
    size: int | None
    is_inverse: bool
    targets: tuple[str, ...]
    ignored: tuple[str, ...]

    def means(self, module: str, layer_class: str) -> bool:
        """Return whether the inputs of the module are transformed."""
        in_targets = layer_class in self.targets or matches(module, self.targets)
        return in_targets and layer_class not in self.ignored and not matches(module, self.ignored)


def input_transforms(config: QuantConfig) -> list[InputTransform]:
    """Return the transforms of inputs that a config asks for. Raises ModelError for transforms of
    other activations."""
    whole = config.part("transform_config")
    groups = None if whole is None else whole.part("config_groups")
    transforms = []
    for name in () if groups is None else groups.values:
        scheme = groups.part(name) if groups is not None else None
        if scheme is None:
            continue
        kind = scheme.one_of("type", TYPES)
        stored = scheme.values.get("head_dim", scheme.values.get("block_size"))
        size = None if stored in (None, -1) else scheme.size(("head_dim", "block_size"))
        places = scheme.values.get("apply")
        if not isinstance(places, list) or not all(isinstance(place, Mapping) for place in places):
            raise scheme.error("apply", places, "needs a list of objects")
        for values in places:
            place = QuantConfig(values, config.method, f"{scheme.place}apply.")
            if place.one_of("location", ("input", *OFFLINE)) == "input":
                transforms.append(
                    InputTransform(
                        name,
                        kind,
                        size,
                        place.flag("inverse"),
                        _names(place, "targets"),
                        _names(place, "ignore"),
                    )
                )
    return transforms


def _names(config: QuantConfig, name: str) -> tuple[str, ...]:
    """Return a list of texts, or the single text that replaces it."""
    value = config.values.get(name)
    return (value,) if isinstance(value, str) else config.names(name)


class InputReader(TransformedReader):
    """Reads a part as another reader does, with a transform of its input."""

    def __init__(self, weight: Reader, of_input: InputTransform, columns: int) -> None:
        super().__init__(weight, f"{of_input.name}_input.weight", of_input.size or columns)
        self.of_input = of_input

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        *wanted, matrix = super().tensors(part, columns, available)
        if self.of_input.type != "hadamard":
            return [*wanted, matrix]
        size = self.of_input.size or columns
        if size & (size - 1):
            raise ModelError(
                f"transform {self.of_input.name!r} of {module_of(part)} needs a power of two, not "
                f"{size}"
            )
        return wanted

    def transform(self, part: Part, columns: int, pieces: Pieces) -> Transform:
        size = self.of_input.size or columns
        if self.of_input.type == "hadamard":
            return Hadamard(size)
        matrix = floats(pieces, f"{module_of(part)}.{self.ending}").float()
        is_inverse = self.of_input.is_inverse
        if self.of_input.type == "random-hadamard":
            signed = SignedHadamard.of(matrix, columns, is_inverse)
            if signed is not None:
                return signed
        matrix = matrix / size**0.5
        return MatrixTransform(matrix.T if is_inverse else matrix)

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [*astuple(self.of_input), *super().key(part, pieces)]

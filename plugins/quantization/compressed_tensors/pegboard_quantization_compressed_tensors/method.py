"""Reads the config of compressed-tensors: which group of `config_groups` a module belongs to, and
how the group is stored."""

from __future__ import annotations

from collections.abc import Iterable

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, QuantizationSetup
from pegboard_quantization_compressed_tensors import sparse
from pegboard_quantization_compressed_tensors.readers import FORMATS, HAVE_GROUPS, Scheme
from pegboard_quantization_compressed_tensors.transforms import InputReader, input_transforms
from pegboard_weights.asked_rounding import AskedRounding, choose_rounding, scheme_rounding
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.grouped import check_whole_groups
from pegboard_weights.stored_weight import AnyLayer, FormatMethod, PlainReader, Reader, columns_of

METHOD = "compressed-tensors"
ROUNDED = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
"""Formats of weights that are multiplied with activations in 8 bits."""


class CompressedTensors(FormatMethod):
    """A module has the scheme of the group whose `targets` name it: by its path, else by a regular
    expression, else by its class (Linear, Embedding). Modules that `ignore` names, and those that
    no group names, are plain."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, METHOD)
        self.is_sparse = _is_sparse(config)
        self.transforms = input_transforms(config)
        self.ignored = config.names("ignore")
        self.kv_dtype = _kv_dtype(config)
        groups = config.part("config_groups")
        if groups is None and not self.is_sparse:
            raise config.error("config_groups", None, "needs an object")
        each = (
            [group for name in groups.values if (group := groups.part(name)) is not None]
            if groups
            else []
        )
        self.schemes: dict[str, Scheme | None] = {}
        is_left_out = False
        for group in reversed(each):  # the first group that names a target counts
            scheme = _scheme(config, group)
            self.schemes.update(dict.fromkeys(group.names("targets"), scheme))
            asks = group.part("input_activations") is not None
            is_left_out |= asks and (scheme is None or scheme.inputs is None)
        if is_left_out:
            config.say_activations_are_not_quantized()
        self.roundings = {
            form: choose_rounding(setup, METHOD, form, asked)
            for form, asked in _asked(self.schemes.values()).items()
        }

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        name = "Embedding" if isinstance(layer, EmbeddingLayer) else "Linear"
        reader = self._quantized(module, name, layer)
        if self.is_sparse:
            reader = sparse.SparseReader(reader or PlainReader())
        transforms = [transform for transform in self.transforms if transform.means(module, name)]
        if len(transforms) > 1:
            names = ", ".join(transform.name for transform in transforms)
            raise ModelError(
                f"the checkpoint's transform_config transforms the input of {module} more than "
                f"once: {names}"
            )
        return (
            InputReader(reader or PlainReader(), transforms[0], columns_of(layer))
            if transforms
            else reader
        )

    def rounding(self, module: str, layer: AnyLayer) -> AskedRounding | None:
        name = "Embedding" if isinstance(layer, EmbeddingLayer) else "Linear"
        scheme = self._scheme(module, name)
        asked = None if scheme is None else scheme.inputs
        return asked if any(asked in each for each in self.roundings.values()) else None

    def _quantized(self, module: str, name: str, layer: AnyLayer) -> Reader | None:
        """Return how the module is quantized. name: of its class in `targets`."""
        scheme = self._scheme(module, name)
        if scheme is None:
            return None
        columns = columns_of(layer)
        check_whole_groups(module, columns, scheme.group(columns), METHOD)
        return FORMATS[scheme.format, scheme.type].make(scheme)

    def _scheme(self, module: str, name: str) -> Scheme | None:
        if name in self.ignored or matches(module, self.ignored):
            return None
        targets = sorted(self.schemes, key=lambda target: target.startswith("re:"))
        target = next((target for target in targets if matches(module, [target])), name)
        return self.schemes.get(target)


def _asked(schemes: Iterable[Scheme | None]) -> dict[str, list[AskedRounding | None]]:
    """Return the roundings of activations by the weight format of the scheme."""
    asked: dict[str, list[AskedRounding | None]] = {}
    for scheme in schemes:
        if scheme is not None and scheme.inputs is not None:
            form = "block_weight" if scheme.type == "int" else "code_weight"
            asked.setdefault(form, []).append(scheme.inputs)
    return asked


def _is_sparse(config: QuantConfig) -> bool:
    """Return whether zeros are left out of the stored weights."""
    sparsity = config.part("sparsity_config")
    return (
        sparsity is not None
        and sparsity.one_of("format", ("dense", *sparse.FORMATS), "dense") != "dense"
    )


def _kv_dtype(config: QuantConfig) -> str | None:
    scheme = config.part("kv_cache_scheme")
    if scheme is None:
        return None
    scheme.one_of("num_bits", (8,))
    if scheme.one_of("type", ("int", "float"), "int") == "int":
        return "int8"
    scheme.one_of("strategy", ("tensor", "attn_head"), "tensor")
    scheme.one_of("symmetric", (True,), True)
    return "float8_e4m3fn"


def _scheme(config: QuantConfig, group: QuantConfig) -> Scheme | None:
    """Return how a group's weights are stored, None if they are plain."""
    weights = group.part("weights")
    if weights is None:
        return None
    named = group if group.values.get("format") is not None else config
    kind = weights.one_of("type", ("int", "float"), "int")
    format = named.one_of("format", [name for name, of_kind in FORMATS if of_kind == kind])
    known = FORMATS[format, kind]
    if format == "marlin-24":
        weights.one_of("symmetric", (True,), True)
    size = None if weights.values.get("group_size") is None else weights.size("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.one_of("strategy", known.strategies, inferred)
    is_rounded = format in ROUNDED and not _has_order(weights)
    return Scheme(
        format=format,
        type=kind,
        bits=weights.one_of("num_bits", known.bits, 8),
        strategy=strategy,
        group_size=weights.size("group_size") if strategy in HAVE_GROUPS else -1,
        is_symmetric=weights.flag("symmetric", True),
        block=_block(weights) if strategy == "block" else (1, 1),
        inputs=scheme_rounding(group.part("input_activations")) if is_rounded else None,
    )


def _has_order(weights: QuantConfig) -> bool:
    """Return whether columns may be stored with a group for each (`weight_g_idx`)."""
    return weights.values.get("actorder") in ("group", "dynamic", True)


def _block(weights: QuantConfig) -> tuple[int, int]:
    """Return rows and columns per scale."""
    sizes = weights.block("block_structure")
    if sizes is None:
        raise weights.error("block_structure", None, "needs two positive numbers")
    return sizes

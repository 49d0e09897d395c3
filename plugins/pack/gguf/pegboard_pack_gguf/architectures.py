"""Translates the tensors of GGUF architectures into Hugging Face terms, with the tables in
`tables`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import TensorEntry
from pegboard_pack_gguf.header import GGUFHeader, GGUFTensor
from pegboard_pack_gguf.mixtures import DEEPSEEK_V3, GRANITE_MOE_SHARED, MIXTRAL
from pegboard_pack_gguf.state_models import FALCON_MAMBA
from pegboard_pack_gguf.table_parts import Architecture, Change
from pegboard_pack_gguf.tables import ARCHITECTURES, FALCON_TWO_NORMS, OLMO3
from pegboard_pack_gguf.unserved import UNSERVED

READ_INTO_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that become part of the configuration and are not in the index."""

MAX_EXPERTS = 10_000

_IN_LAYER = re.compile(r"blk\.(\d{1,5})\.")
_LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias|scale)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias|scale)")
_UNUSED = re.compile(r"blk\.\d{1,5}\.(rope_freqs|attn_rot_embd|\w+\.input_scale)(\.weight)?")
"""Tensors that change no result: frequencies that follow from the configuration, and scales for
activations in 4 bits."""

_OF_ONE_ROW = ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
"""Matrices of one row. GGUF drops the dimension of one."""

_OTHERS = (MIXTRAL, OLMO3, DEEPSEEK_V3, GRANITE_MOE_SHARED, FALCON_MAMBA)
BY_MODEL_TYPE = {each.model_type: each for each in (*ARCHITECTURES.values(), *_OTHERS)}
"""Any architecture of the model type. All of them have the same names and changes."""


def architecture_of(header: GGUFHeader) -> tuple[str, Architecture]:
    """Returns the name that the file uses (also the prefix of its metadata keys) and the
    architecture that it means."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{header.path} contains no model: its general.type is {kind!r}")
    name = header.metadata.get("general.architecture")
    if isinstance(name, str) and name in UNSERVED:
        raise ModelError(
            f"{header.path}: models of the GGUF architecture {name!r} cannot be served: "
            f"{UNSERVED[name]}"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: GGUF architecture {name!r} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    if header.metadata.get(f"{name}.expert_count") and not ARCHITECTURES[name].experts:
        if name != "llama":
            raise ModelError(
                f"{header.path}: models of the GGUF architecture {name!r} with experts are not "
                "supported"
            )
        return name, MIXTRAL
    if name == "mistral3" and header.metadata.get("mistral3.attention.temperature_scale"):
        raise ModelError(
            f"{header.path}: metadata mistral3.attention.temperature_scale is set; models whose "
            "queries grow with their position (Ministral 3) are not supported. Use a file of "
            "Mistral Small 3"
        )
    if name == "deepseek2" and any(
        tensor.name.endswith(".exp_probs_b.bias") for tensor in header.tensors
    ):
        return name, DEEPSEEK_V3
    if name == "mamba" and header.metadata.get("mamba.ssm.dt_b_c_rms"):
        return name, FALCON_MAMBA
    if name == "granitemoe" and any("_shexp." in tensor.name for tensor in header.tensors):
        return name, GRANITE_MOE_SHARED
    if name == "olmo2" and header.metadata.get("olmo2.attention.sliding_window"):
        return name, OLMO3
    if name == "falcon" and any(
        tensor.name.endswith(".attn_norm_2.weight") for tensor in header.tensors
    ):
        return name, FALCON_TWO_NORMS
    return name, ARCHITECTURES[name]


def tensor_entries(
    header: GGUFHeader, architecture: Architecture, config: Mapping[str, Any]
) -> Iterator[TensorEntry]:
    """Yields the file's tensors by their Hugging Face names, without those of layers that draft
    tokens (MTP). Raises ModelError for an unknown tensor, because without it, a different model
    would be computed."""
    num_layers = config["num_hidden_layers"]
    drafting = range(num_layers, num_layers + config.get("num_nextn_predict_layers", 0))
    names = {tensor.name for tensor in header.tensors}
    for tensor in header.tensors:
        match = _IN_LAYER.match(tensor.name)
        index = int(match[1]) if match is not None else None
        if tensor.name in READ_INTO_CONFIG or _UNUSED.fullmatch(tensor.name) or index in drafting:
            continue
        own_name = tensor.name[match.end() :] if match is not None else ""
        if index is not None and index < num_layers and own_name in architecture.whole:
            path = f"{architecture.layers}.{index}.{architecture.whole[own_name]}"
            yield _entry(header, tensor, path, architecture.changes.get(own_name))
            continue
        match = _LAYER_NAME.fullmatch(tensor.name)
        if match is not None and index is not None and index < num_layers:
            prefix = f"{architecture.layers}.{index}."
            name = match[2]
            ending = match[3]
            if (
                name == "attn_k_b"
                and architecture.is_latent
                and f"blk.{index}.attn_kv_b.weight" not in names
            ):
                yield _up_projection(header, tensor, prefix, config)
            if name in architecture.experts and len(tensor.shape) == {"weight": 3, "bias": 2}.get(
                ending
            ):
                yield from _expert_entries(
                    header, tensor, f"{prefix}{architecture.experts[name]}.{ending}"
                )
                continue
            if name in architecture.split:
                yield from _split_entries(
                    header,
                    tensor,
                    [f"{prefix}{part}.{ending}" for part in architecture.split[name]],
                    config,
                )
                continue
            if name in architecture.layer:
                change = architecture.changes.get(name)
                yield _entry(
                    header,
                    tensor,
                    f"{prefix}{architecture.layer[name]}.{ending}",
                    change if ending != "scale" else None,
                )
                continue
        match = _TOP_NAME.fullmatch(tensor.name)
        if match is None or match[1] not in architecture.top:
            raise ModelError(
                f"{header.path}: tensor {tensor.name!r} has no place in a "
                f"{architecture.class_name} of {num_layers} layers"
            )
        yield _entry(header, tensor, f"{architecture.top[match[1]]}.{match[2]}", None)


def change_of(architecture: Architecture, name: str) -> Change | None:
    """Returns what is done to the tensor with this Hugging Face name before it is delivered."""
    module, _, ending = name.rpartition(".")
    if ending == "scale":
        return None
    for part, change in architecture.changes.items():
        whole = architecture.whole.get(part)
        if whole is not None and re.fullmatch(
            rf"{re.escape(architecture.layers)}\.\d+\.{re.escape(whole)}", name
        ):
            return change
        if architecture.top.get(part) == module:
            return change
        path = architecture.layer.get(part)
        if path is not None and re.fullmatch(
            rf"{re.escape(architecture.layers)}\.\d+\.{re.escape(path)}", module
        ):
            return change
    return None


def has_offset(architecture: Architecture, name: str) -> bool:
    """True if the converter added `norm_offset` to the tensor with this Hugging Face name."""
    of_states = architecture.layer.get("ssm_norm")
    is_of_state = of_states is not None and name.endswith(f".{of_states}.weight")
    return bool(architecture.norm_offset) and name.endswith("norm.weight") and not is_of_state


def joined_entries(
    path: str, index: Mapping[str, TensorEntry], joined: Mapping[str, tuple[str, ...]]
) -> Iterator[TensorEntry]:
    """Yields the tensors of `joined` whose parts are in the index. joined: see `Architecture`.
    Parts of different types become float32. Raises ModelError if a part is missing or has other
    columns than the first."""
    for name, first in index.items():
        for whole, parts in joined.items():
            match = re.fullmatch(rf"(.+\.){re.escape(parts[0])}(\.weight|\.bias)", name)
            if match is None:
                continue
            names = [f"{match[1]}{part}{match[2]}" for part in parts]
            entries = [index.get(each) for each in names]
            rows = 0
            for each, entry in zip(names, entries, strict=True):
                if entry is None or entry.shape[1:] != first.shape[1:]:
                    has = "no" if entry is None else f"a tensor of shape {entry.shape} as"
                    raise ModelError(
                        f"{path} has {has} {each!r}, which is joined with {name!r} of shape "
                        f"{first.shape}"
                    )
                rows += entry.shape[0]
            stored = (
                first.stored
                if all(entry and entry.stored == first.stored for entry in entries)
                else "float32"
            )
            if (name_of_whole := f"{match[1]}{whole}{match[2]}") in index:
                raise ModelError(
                    f"{path} has both {name_of_whole!r} and its parts, "
                    f"{', '.join(map(repr, names))}"
                )
            num_bytes = sum(entry.num_bytes for entry in entries if entry)
            shape = (rows, *first.shape[1:])
            yield TensorEntry(name_of_whole, shape, stored, first.file, first.offset, num_bytes)


def joined_parts(
    joined: Mapping[str, tuple[str, ...]], name: str, tensors: Mapping[str, TensorEntry]
) -> tuple[str, ...]:
    """Returns the names of the tensors that this one is joined from, () if it is stored as it
    is."""
    module, _, ending = name.rpartition(".")
    for whole, parts in joined.items():
        if module.endswith(f".{whole}"):
            names = tuple(f"{module.removesuffix(whole)}{part}.{ending}" for part in parts)
            return names if names[0] in tensors else ()
    return ()


def up_projection_parts(entry: TensorEntry, tensors: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Returns the names of the tensors of keys and of values that this one is joined from, () if it
    is stored as it is."""
    before, _, ending = entry.name.rpartition(".kv_b_proj.")
    keys = tensors.get(f"{before}.k_b_proj.{ending}")
    is_joined = (
        keys is not None
        and (keys.file, keys.offset) == (entry.file, entry.offset)
        and keys.name != entry.name
    )
    return (f"{before}.k_b_proj.{ending}", f"{before}.v_b_proj.{ending}") if is_joined else ()


def _entry(header: GGUFHeader, tensor: GGUFTensor, name: str, change: Change | None) -> TensorEntry:
    shape = tensor.shape
    if name.endswith(_OF_ONE_ROW) and len(shape) == 1:
        shape = (1, *shape)
    if change == "transpose" and len(shape) == 2:
        shape = shape[::-1]
    if change == "flat":
        shape = (math.prod(shape),)
    if change == "logarithm" and shape[-1:] == (1,):
        shape = shape[:-1]
    if change == "convolution" and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    return TensorEntry(
        name, shape, tensor.type.stored, header.path.name, tensor.offset, tensor.num_bytes
    )


def _up_projection(
    header: GGUFHeader, tensor: GGUFTensor, prefix: str, config: Mapping[str, Any]
) -> TensorEntry:
    """Returns the matrix that makes keys and values of latent vectors. The file has a tensor [H, C,
    N] for the keys, and one [H, V, C] for the values; they are joined and become floats when they
    are delivered."""
    heads = config["num_attention_heads"]
    rank = config["kv_lora_rank"]
    nope = config["qk_nope_head_dim"]
    if tensor.shape != (heads, rank, nope):
        raise ModelError(
            f"{header.path}: tensor {tensor.name!r} has shape {tensor.shape}, expected "
            f"{(heads, rank, nope)}"
        )
    shape = (heads * (nope + config["v_head_dim"]), rank)
    name = f"{prefix}self_attn.kv_b_proj.weight"
    return TensorEntry(name, shape, "float32", header.path.name, tensor.offset, tensor.num_bytes)


def _split_entries(
    header: GGUFHeader, tensor: GGUFTensor, names: list[str], config: Mapping[str, Any]
) -> Iterator[TensorEntry]:
    """Yields Q, K and V, which are stored in one tensor one after the other."""
    heads = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["num_key_value_heads"],
    )
    rows = [count * config["head_dim"] for count in heads]
    if sum(rows) != tensor.shape[0]:
        raise ModelError(
            f"{header.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, expected "
            f"{' + '.join(map(str, rows))}"
        )
    row_bytes = tensor.num_bytes // tensor.shape[0]
    offset = tensor.offset
    for name, count in zip(names, rows, strict=True):
        yield TensorEntry(
            name,
            (count, *tensor.shape[1:]),
            tensor.type.stored,
            header.path.name,
            offset,
            count * row_bytes,
        )
        offset += count * row_bytes


def _expert_entries(header: GGUFHeader, tensor: GGUFTensor, pattern: str) -> Iterator[TensorEntry]:
    num_experts, *shape = tensor.shape
    if num_experts > MAX_EXPERTS:
        raise ModelError(
            f"{header.path}: tensor {tensor.name!r} contains {num_experts} experts, expected at "
            f"most {MAX_EXPERTS}"
        )
    size = tensor.num_bytes // num_experts
    for expert in range(num_experts):
        offset = tensor.offset + expert * size
        yield TensorEntry(
            pattern.format(expert), tuple(shape), tensor.type.stored, header.path.name, offset, size
        )

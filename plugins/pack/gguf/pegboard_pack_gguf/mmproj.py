"""Reads the vision tower and the projector of a model, which llama.cpp stores in a GGUF file of
their own: "mmproj-….gguf", of the architecture "clip". Standard library only.

The tables have the names that the same tensors have on Hugging Face. The names of the file, and
what its metadata means, come from llama.cpp's `clip.cpp` and its converters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import TensorEntry
from pegboard_pack_gguf.header import GGUFTensor, read_header
from pegboard_pack_gguf.metadata import Metadata
from pegboard_pack_gguf.mmproj_config import PROCESSORS, VISION, config_of

PATTERN = "mmproj*.gguf"
SOFT_NORM = "multi_modal_projector.mm_soft_emb_norm.weight"
"""The converter added 1 to it."""
PARTS = ("connector.", "multi_modal_projector.", "vision_model.", "vision_tower.")
"""Beginnings of the names that tensors of these files have on Hugging Face."""

_LAYER_NAME = re.compile(r"v\.blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SWAPPED = {**_LAYER, "ffn_up": "mlp.fc2", "ffn_down": "mlp.fc1"}
"""Older converters call the first layer of a block "down"."""


@dataclass(frozen=True, slots=True)
class Projector:
    """What the file of a projector type has. tower: where the tower is. top: Hugging Face names by
    those of the file, but for layers. last: the tensor whose dimension `side` is the width of the
    language model."""

    tower: str
    top: Mapping[str, str]
    last: str
    side: int = 0


_EMBEDDINGS = {
    "v.patch_embd.weight": "embeddings.patch_embedding.weight",
    "v.position_embd.weight": "embeddings.position_embedding.weight",
}
_SIGLIP = {
    **_EMBEDDINGS,
    "v.patch_embd.bias": "embeddings.patch_embedding.bias",
    "v.post_ln.weight": "post_layernorm.weight",
    "v.post_ln.bias": "post_layernorm.bias",
}
_CLIP = {
    **_EMBEDDINGS,
    "v.class_embd": "embeddings.class_embedding",
    "v.pre_ln.weight": "pre_layrnorm.weight",
    "v.pre_ln.bias": "pre_layrnorm.bias",
}


def _below(tower: str, names: Mapping[str, str]) -> dict[str, str]:
    return {name: f"{tower}.{path}" for name, path in names.items()}


_TOWER = "vision_tower.vision_model"
_MLP = {
    f"mm.{number}.{ending}": f"multi_modal_projector.linear_{place}.{ending}"
    for number, place in ((0, 1), (2, 2))
    for ending in ("weight", "bias")
}
PROJECTORS = {
    "mlp": Projector(_TOWER, {**_below(_TOWER, _CLIP), **_MLP}, "mm.2.weight"),
    "idefics3": Projector(
        "vision_model",
        {
            **_below("vision_model", _SIGLIP),
            "mm.model.fc.weight": "connector.modality_projection.proj.weight",
        },
        "mm.model.fc.weight",
    ),
    "gemma3": Projector(
        _TOWER,
        {
            **_below(_TOWER, _SIGLIP),
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm.weight": SOFT_NORM,
        },
        "mm.input_projection.weight",
        side=1,
    ),
}


def find_mmproj(model: Path, asked: str) -> Path | None:
    """Return the file beside a model, or None. asked: "auto" for the only one, "none", or the name
    of a file. Raises ModelError if there are several, or if the named one does not exist."""
    if asked == "none":
        return None
    if asked != "auto":
        path = model.parent / asked
        if not path.is_file():
            raise ModelError(f"there is no file {path}, which the option mmproj names")
        return path
    paths = sorted(path for path in model.parent.glob(PATTERN) if path != model)
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise ModelError(
            f"{model.parent} has several files for images: {names}; name one of them with "
            "--weight_loader.gguf.mmproj, or leave them out with none"
        )
    return paths[0] if paths else None


class Mmproj:
    """A file of a vision tower and its projector. Raises ModelError if it is damaged, or if its
    projector is of an unknown type."""

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        values = self.header.metadata
        name = values.get("general.architecture")
        if name != "clip":
            raise ModelError(
                f"{path} is no vision tower: its general.architecture is {name!r}, expected 'clip'"
            )
        kind = values.get("clip.vision.projector_type", values.get("clip.projector_type"))
        if kind is None and values.get("clip.has_llava_projector") is True:
            kind = "mlp"  # the oldest files have only this kind, and no name for it
        if not isinstance(kind, str) or kind not in PROJECTORS:
            raise ModelError(
                f"{path} has clip.projector_type {kind!r}; supported are {', '.join(PROJECTORS)}. "
                "Use --weight_loader.gguf.mmproj none to serve the language model alone"
            )
        self.kind = kind
        self.projector = PROJECTORS[kind]
        self.tensors = {tensor.name: tensor for tensor in self.header.tensors}

    def config(self, text: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
        """Return the config of the whole model. text: that of the language model. tokens: its
        vocabulary. Raises ModelError for metadata that is missing, wrong or not supported."""
        path = self.header.path
        last = self.tensors.get(self.projector.last)
        shape = None if last is None else last.shape
        width = text["hidden_size"]
        if shape is None or len(shape) != 2 or shape[self.projector.side] != width:
            raise ModelError(
                f"{path}: {self.projector.last} has shape {shape}; the language model has vectors "
                f"of {width} numbers. Use the file that was made for this model"
            )
        config = config_of(self.kind, Metadata(self.header, VISION), text, tokens)
        self._check_sizes(config["vision_config"])
        return {**config, "preprocessor_config": PROCESSORS[self.kind](config, self.header)}

    def entries(self, file: str, config: Mapping[str, Any]) -> Iterator[TensorEntry]:
        """Yield the tensors by their Hugging Face names. file: as the loader finds it. Raises
        ModelError for a tensor that the model has no place for, because without it, a different
        model would be computed."""
        num_layers = config["vision_config"]["num_hidden_layers"]
        names = _SWAPPED if self._is_swapped() else _LAYER
        for tensor in self.header.tensors:
            match = _LAYER_NAME.fullmatch(tensor.name)
            name = self.projector.top.get(tensor.name)
            if match is not None and int(match[1]) < num_layers and match[2] in names:
                place = f"{self.projector.tower}.encoder.layers.{int(match[1])}"
                name = f"{place}.{names[match[2]]}.{match[3]}"
            if name is None:
                raise ModelError(
                    f"{self.header.path}: tensor {tensor.name!r} has no place in a model with the "
                    f"projector {self.kind!r} and a tower of {num_layers} layers"
                )
            yield _entry(tensor, name, file)

    def _check_sizes(self, vision: Mapping[str, Any]) -> None:
        """Raise ModelError if the tensors are not those of a tower of these sizes. So a wrong
        number makes no huge tower."""
        size = vision["hidden_size"]
        patch = vision["patch_size"]
        has_class = "v.class_embd" in self.projector.top
        expected = {
            "v.patch_embd.weight": (size, 3, patch, patch),
            "v.position_embd.weight": ((vision["image_size"] // patch) ** 2 + has_class, size),
        }
        for name, shape in expected.items():
            stored = self.tensors[name].shape if name in self.tensors else None
            if stored != shape:
                raise ModelError(
                    f"{self.header.path}: {name} has shape {stored}; the metadata says {shape}"
                )
        matches = (_LAYER_NAME.fullmatch(name) for name in self.tensors)
        count = max((int(match[1]) + 1 for match in matches if match), default=0)
        if count != vision["num_hidden_layers"]:
            raise ModelError(
                f"{self.header.path} has {count} layers; its metadata clip.vision.block_count says "
                f"{vision['num_hidden_layers']}"
            )

    def _is_swapped(self) -> bool:
        """Return whether the file has the layers of a block under each other's names."""
        down = self.tensors.get("v.blk.0.ffn_down.weight")
        size = Metadata(self.header, VISION).count("embedding_length")
        return down is not None and len(down.shape) == 2 and down.shape[0] != size == down.shape[1]


def _entry(tensor: GGUFTensor, name: str, file: str) -> TensorEntry:
    return TensorEntry(
        name, tensor.shape, tensor.type.stored, file, tensor.offset, tensor.num_bytes
    )

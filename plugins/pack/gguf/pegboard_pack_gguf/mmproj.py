"""Reads the tower of a model for images or audio, and its projector, which llama.cpp stores in a
GGUF file of their own: "mmproj-….gguf", of the architecture "clip". Standard library only.

The tables have the names that the same tensors have on Hugging Face. The names of the file, and
what its metadata means, come from llama.cpp's `clip.cpp` and its converters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import TensorEntry
from pegboard_pack_gguf.header import GGUFTensor, read_header
from pegboard_pack_gguf.metadata import Metadata
from pegboard_pack_gguf.mmproj_internvl import INTERNVL
from pegboard_pack_gguf.mmproj_parts import AUDIO, KNOWN, VISION, Parts, Shapes, Sizes
from pegboard_pack_gguf.mmproj_pixtral import PIXTRAL
from pegboard_pack_gguf.mmproj_qwen_vl import QWEN2_5_VL, QWEN2_VL
from pegboard_pack_gguf.mmproj_square import GEMMA3, IDEFICS3, LLAVA
from pegboard_pack_gguf.mmproj_whisper import QWEN2_AUDIO, ULTRAVOX, VOXTRAL

PATTERN = "mmproj*.gguf"
PARTS = (
    "audio_tower.",
    "connector.",
    "multi_modal_projector.",
    "vision_model.",
    "vision_tower.",
    "visual.",
)
"""Beginnings of the names that tensors of these files have on Hugging Face."""
PROJECTORS = {
    "mlp": LLAVA,
    "idefics3": IDEFICS3,
    "gemma3": GEMMA3,
    "pixtral": PIXTRAL,
    "internvl": INTERNVL,
    "qwen2vl_merger": QWEN2_VL,
    "qwen2.5vl_merger": QWEN2_5_VL,
    "ultravox": ULTRAVOX,
    "qwen2a": QWEN2_AUDIO,
    "voxtral": VOXTRAL,
}

_LAYER_NAME = re.compile(r"[av]\.blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


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
            f"{model.parent} has several files for images or audio: {names}; name one of them with "
            "--weight_loader.gguf.mmproj, or leave them out with none"
        )
    return paths[0] if paths else None


class Mmproj:
    """A file of a tower and its projector. language, text: the metadata and the config of
    the language model. tokens: its vocabulary. Raises ModelError if the file is damaged, if its
    projector is of an unknown type, and for metadata that is missing, wrong or not supported."""

    def __init__(
        self, path: Path, language: Metadata, text: Mapping[str, Any], tokens: Sequence[str]
    ) -> None:
        self.header = read_header(path)
        values = self.header.metadata
        name = values.get("general.architecture")
        if name != "clip":
            raise ModelError(
                f"{path} is no tower for images or audio: its general.architecture is {name!r}, "
                "expected 'clip'"
            )
        names = (f"{VISION}.projector_type", f"{AUDIO}.projector_type", "clip.projector_type")
        kind = next((values[name] for name in names if name in values), None)
        if kind is None and values.get("clip.has_llava_projector") is True:
            kind = "mlp"  # the oldest files have only this kind, and no name for it
        if not isinstance(kind, str) or kind not in PROJECTORS:
            raise ModelError(
                f"{path} has clip.projector_type {kind!r}; supported are {', '.join(PROJECTORS)}. "
                "Use --weight_loader.gguf.mmproj none to serve the language model alone"
            )
        self.kind = kind
        self.projector = PROJECTORS[kind]
        self._letter = "v" if self.projector.place == VISION else "a"
        self._check_metadata()
        metadata = Metadata(self.header, self.projector.place)
        shapes = {tensor.name: tensor.shape for tensor in self.header.tensors}
        self._check_width(shapes, text["hidden_size"])
        self._check_axes(language)
        self.parts = Parts(metadata, language, Sizes.of(metadata, text), shapes, text, tokens)
        self._check_depth()
        self.shapes = self.projector.shapes(self.parts)

    def config(self) -> dict[str, Any]:
        """Return the config of the whole model. Raises ModelError for metadata that is missing,
        wrong or not supported."""
        text = self.parts.text
        config = {
            "text_config": dict(text),
            "tie_word_embeddings": text["tie_word_embeddings"],
            **{name: text[name] for name in text if name.endswith("_token_id")},
            **self.projector.config(self.parts),
        }
        self._check_sizes()
        return {**config, "preprocessor_config": self.projector.processor(self.parts)}

    def entries(self, file: str) -> Iterator[TensorEntry]:
        """Yield the tensors by their Hugging Face names. file: as the loader finds it. Raises
        ModelError for a tensor that the model has no place for, because without it, a different
        model would be computed."""
        for tensor in self.header.tensors:
            if tensor.name not in self.projector.ignored:
                yield self._entry(tensor, file)
        if self.projector.frames:
            yield self._of_frames(file)

    def _entry(self, tensor: GGUFTensor, file: str) -> TensorEntry:
        depth = self.parts.sizes.depth
        match = _LAYER_NAME.fullmatch(tensor.name)
        name = self.projector.top.get(tensor.name)
        is_of_tower = tensor.name.startswith(f"{self._letter}.")
        if match is not None and is_of_tower and int(match[1]) < depth:
            place = f"{self.projector.layers}.{int(match[1])}"
            module = self._layer().get(match[2])
            name = f"{place}.{module}.{match[3]}" if module else None
            if whole := self.projector.layer.get(f"{match[2]}.{match[3]}"):
                name = f"{place}.{whole}"
        if name is None:
            raise ModelError(
                f"{self.header.path}: tensor {tensor.name!r} has no place in a model with the "
                f"projector {self.kind!r} and a tower of {depth} layers"
            )
        shape = self.shapes.get(tensor.name, tensor.shape)
        return TensorEntry(name, shape, tensor.type.stored, file, tensor.offset, tensor.num_bytes)

    def _of_frames(self, file: str) -> TensorEntry:
        """Return the matrix of patches of several frames."""
        first = self.projector.frames[0]
        name = self.projector.top[first].rpartition(".")[0]
        width, colors, *sides = self.shapes[first]
        shape = (width, colors, len(self.projector.frames), *sides)
        tensor = next(tensor for tensor in self.header.tensors if tensor.name == first)
        return TensorEntry(name, shape, "float32", file, tensor.offset, tensor.num_bytes)

    def _check_metadata(self) -> None:
        """Raise ModelError for metadata that is not read."""
        values = self.header.metadata
        path = self.header.path
        for name, expected in (
            ("vision_encoder", self.projector.place == VISION),
            ("audio_encoder", self.projector.place == AUDIO),
            ("text_encoder", False),
        ):
            if values.get(f"clip.has_{name}", expected) is not expected:
                raise ModelError(
                    f"{path} has clip.has_{name} {values[f'clip.has_{name}']!r}; expected "
                    f"{expected}"
                )
        known = KNOWN[self.projector.place] | self.projector.keys
        unknown = sorted(key for key in values if key.startswith("clip.") and key not in known)
        if unknown:
            raise ModelError(
                f"{path}: metadata {', '.join(unknown)} is not supported with the projector "
                f"{self.kind!r}"
            )

    def _check_width(self, shapes: Shapes, width: int) -> None:
        """Raise ModelError if the projector makes vectors of another size than `width`."""
        last = self.projector.last
        shape = shapes.get(last)
        if shape is None or len(shape) != 2 or shape[self.projector.side] != width:
            raise ModelError(
                f"{self.header.path}: {last} has shape {shape}; the language model has vectors "
                f"of {width} numbers. Use the file that was made for this model"
            )

    def _check_axes(self, language: Metadata) -> None:
        """Raise ModelError if the language model has positions on three axes, and the projector is
        that of a model without, or the other way."""
        has_axes = language.has("rope.dimension_sections")
        if has_axes != self.projector.has_axes:
            raise ModelError(
                f"{self.header.path} has the projector {self.kind!r}; the language model beside it "
                f"has {'' if has_axes else 'no '}positions on three axes "
                f"({language.prefix}.rope.dimension_sections). Use the file that was made for it"
            )

    def _check_sizes(self) -> None:
        """Raise ModelError if the tensors are not those of a tower of these sizes. So a wrong
        number makes no huge tower. Converters drop dimensions of one, or not."""
        stored = self.parts.shapes
        for name, shape in self.shapes.items():
            given = stored.get(name)
            if given is None or _dropped(given) != _dropped(shape):
                raise ModelError(
                    f"{self.header.path}: {name} has shape {given}; the metadata says {shape}"
                )

    def _check_depth(self) -> None:
        """Raise ModelError if the file has other layers than its metadata says."""
        matches = (_LAYER_NAME.fullmatch(name) for name in self.parts.shapes)
        count = max((int(match[1]) + 1 for match in matches if match), default=0)
        if count != self.parts.sizes.depth:
            raise ModelError(
                f"{self.header.path} has {count} layers; its metadata "
                f"{self.projector.place}.block_count says {self.parts.sizes.depth}"
            )

    def _layer(self) -> dict[str, str]:
        """Return the names in a layer. Older converters call the first layer of a block "down"."""
        names = dict(self.projector.layer)
        down = self.parts.shapes.get(f"{self._letter}.blk.0.ffn_down.weight", ())
        size = self.parts.sizes.width
        if len(down) == 2 and down[0] != size == down[1]:
            names["ffn_up"], names["ffn_down"] = names["ffn_down"], names["ffn_up"]
        return names


def _dropped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)

"""What processors of images and audio share. This module does not import torch or transformers,
because it is loaded in the API process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.weight_loader import Checkpoint

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer

FILES = ("preprocessor_config.json", "processor_config.json")
"""Each may say how images are processed."""
IN_CONFIG = "preprocessor_config"
"""The key of a config with the values of the first of `FILES`, for checkpoints in one file."""


def folder_of(checkpoint: Checkpoint) -> Path:
    return checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises ModelError if it is something else."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} has {type(values).__name__}; expected an object")
    return values


def processor_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the values of processor_config.json. Without the file, there are none. Raises
    ModelError if it is wrong."""
    path = folder_of(checkpoint) / FILES[1]
    return json_object(path) if path.is_file() else {}


def described(
    checkpoint: Checkpoint, part: str, defaults: Mapping[str, Any], files: Sequence[str] = FILES[:1]
) -> dict[str, Any]:
    """Return how items are processed: what processor_config.json says of this part, or else the
    first of the files. defaults: of what they do not say, and the names that are read. Raises
    ModelError for files that are wrong."""
    folder = folder_of(checkpoint)
    values = processor_values(checkpoint).get(part)
    paths = [folder / name for name in files if (folder / name).is_file()]
    if values is None and paths:
        values = json_object(paths[0])
    if values is not None and not isinstance(values, Mapping):
        raise ModelError(f"{folder} describes its {part} as {values!r}; expected an object")
    given = {name: value for name, value in (values or {}).items() if value is not None}
    return {name: given.get(name, default) for name, default in defaults.items()}


def check_values(values: Mapping[str, Any], rules: Mapping[str, tuple[bool, str]]) -> None:
    """Raise ModelError for a value of a checkpoint's image processor that is wrong. rules: by its
    name, whether it is right, and what was expected."""
    for name, (is_right, expected) in rules.items():
        if not is_right:
            raise ModelError(
                f"the checkpoint's image processor has {name}={values[name]!r}; expected "
                f"{expected}. Correct {FILES[0]}"
            )


def is_color(value: object) -> bool:
    """Return whether a value is a number for each of red, green and blue."""
    if not isinstance(value, list | tuple) or len(value) != 3:
        return False
    return all(isinstance(part, int | float) and not isinstance(part, bool) for part in value)


def token_id(tokenizer: "Tokenizer", text: str) -> int:
    """Return the id of a special token. Raises ModelError if the tokenizer has no such token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or tokenizer.decode(ids, skip_special_tokens=False).strip() != text:
        raise ModelError(
            f"the checkpoint's tokenizer has no special token {text!r}; it makes {list(ids)} of it."
            " Use the tokenizer of the model's repository"
        )
    return ids[0]


class ImageProcessor:
    """The image processor of transformers that a checkpoint's folder names, with PIL. Without such
    a file, the checkpoint's config may name it. values: those of its class, if neither counts.
    Raises ModelError if none names it or it is wrong, and RequestError for options that it does not
    take."""

    def __init__(self, checkpoint: Checkpoint, values: Mapping[str, Any] | None = None) -> None:
        self.inner = _image_processor(checkpoint) if values is None else _made_of(values)
        self.names = frozenset(self.inner.valid_kwargs.__annotations__)
        self.fixed: dict[str, Any] = {}

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise RequestError for options that the image processor does not take."""
        if unknown := sorted({*options} - self.names):
            raise RequestError(
                f"mm_processor_kwargs has {', '.join(unknown)}; the image processor "
                f"{type(self.inner).__name__} takes {', '.join(sorted(self.names))}",
                parameter="mm_processor_kwargs",
            )

    def refuse(self, name: str) -> None:
        """Take no option of this name."""
        self.names -= {name}

    def fix(self, name: str, value: Any) -> None:
        """Set a value that options cannot change."""
        self.refuse(name)
        self.fixed[name] = value

    def __call__(self, images: Any, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the arrays of these RGB PIL images. The first dimension is that of the images."""
        self.check(options)
        try:
            arrays = self.inner(images, **self.fixed, **options, return_tensors="np")
        except Exception as error:
            how = f" with {dict(options)}" if options else ""
            raise RequestError(
                f"the image could not be processed{how}: {error}",
                parameter="mm_processor_kwargs" if options else None,
            ) from error
        return {str(name): value for name, value in arrays.items()}


def _image_processor(checkpoint: Checkpoint) -> Any:
    from transformers import AutoImageProcessor

    folder = folder_of(checkpoint)
    has_file = any((folder / name).is_file() for name in FILES)
    given = checkpoint.config.get(IN_CONFIG)
    values: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if not has_file and not values:
        raise ModelError(
            f"{folder} has neither {FILES[0]} nor {FILES[1]}; one of them says how images are "
            "processed. Copy it from the model's repository"
        )
    try:
        if has_file:
            return AutoImageProcessor.from_pretrained(
                str(folder), backend="pil", local_files_only=True
            )
        return _made_of(values)
    except Exception as error:
        raise ModelError(f"{folder}: the image processor cannot be loaded: {error}") from error


def _made_of(values: Mapping[str, Any]) -> Any:
    from transformers.models.auto import image_processing_auto

    name = f"{values['image_processor_type']}Pil"
    kind: Any = image_processing_auto.get_image_processor_class_from_name(name)
    return kind.from_dict({**values})


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise RequestError if there are options of a processor that takes none."""
    if options:
        raise RequestError(
            f"mm_processor_kwargs has {', '.join(sorted(options))}; this model's processor of "
            "audio takes none. Leave them out",
            parameter="mm_processor_kwargs",
        )


def token_of(config: Mapping[str, Any], modality: str, default: int | None = None) -> int:
    """Return the id of the token that stands for an item of this modality. default: of configs that
    name none. Raises ModelError."""
    names = (f"{modality}_token_index", f"{modality}_token_id")
    token = next((config[name] for name in names if config.get(name) is not None), default)
    if type(token) is not int or token < 0:
        raise ModelError(
            f"the checkpoint's config has {names[0]}={token!r}; expected the id of a token"
        )
    return token


def square_pixels(values: np.ndarray, size: int) -> np.ndarray:
    """Return the pixels as float32 [..., 3, size, size]. Raises RequestError if they have another
    size."""
    if values.shape[-3:] != (3, size, size):
        raise RequestError(
            f"the processed image has shape {list(values.shape)}; the vision tower takes "
            f"[3, {size}, {size}]. Do not change sizes with mm_processor_kwargs, or correct "
            "preprocessor_config.json",
            parameter="mm_processor_kwargs",
        )
    return np.ascontiguousarray(values, dtype=np.float32)

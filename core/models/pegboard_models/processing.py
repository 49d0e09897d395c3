"""What processors of images share. This module does not import torch or transformers, because it is
loaded in the API process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.weight_loader import Checkpoint

if TYPE_CHECKING:
    import numpy as np

FILES = ("preprocessor_config.json", "processor_config.json")
"""Each may say how images are processed."""


class ImageProcessor:
    """The image processor of transformers that a checkpoint's folder names, with PIL. Raises
    ModelError if there is no such file or it is wrong, and RequestError for options that it does
    not take."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import AutoImageProcessor

        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        if not any((folder / name).is_file() for name in FILES):
            raise ModelError(
                f"{folder} has neither {FILES[0]} nor {FILES[1]}; one of them says how images are "
                "processed. Copy it from the model's repository"
            )
        try:
            self.inner: Any = AutoImageProcessor.from_pretrained(
                str(folder), backend="pil", local_files_only=True
            )
        except Exception as error:
            raise ModelError(f"{folder}: the image processor cannot be loaded: {error}") from error
        self.names = frozenset(self.inner.valid_kwargs.__annotations__)
        self.fixed: dict[str, Any] = {}

    def _check(self, options: Mapping[str, Any]) -> None:
        if unknown := sorted({*options} - self.names):
            raise RequestError(
                f"mm_processor_kwargs has {', '.join(unknown)}; the image processor "
                f"{type(self.inner).__name__} takes {', '.join(sorted(self.names))}",
                parameter="mm_processor_kwargs",
            )

    def fix(self, name: str, value: Any) -> None:
        """Set a value that options cannot change."""
        self.names -= {name}
        self.fixed[name] = value

    def __call__(self, images: Any, options: Mapping[str, Any]) -> dict[str, "np.ndarray"]:
        """Return the arrays of these RGB PIL images. The first dimension is that of the images."""
        self._check(options)
        try:
            arrays = self.inner(images, **self.fixed, **options, return_tensors="np")
        except Exception as error:
            raise RequestError(
                f"the image could not be processed with {dict(options)}: {error}",
                parameter="mm_processor_kwargs",
            ) from error
        return {str(name): value for name, value in arrays.items()}


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

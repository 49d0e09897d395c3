"""Models that read images, run with transformers' modules.

loading   The language model is that of `TransformersModel`. All other modules, such as a vision
          tower and a projector, are transformers' own, with their tensors loaded by name.
check     The model is run once with made-up rows in the place of its tower and a recorder in the
          place of its language model. If it does more than replacing the embeddings of the image
          tokens by these rows, it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from pegboard.errors import ModelError
from pegboard.layers import Build
from pegboard_model_transformers.model import (
    TransformersModel,
    built_on_meta,
    make_buffers,
    parsed_config,
)
from pegboard_model_transformers.modules import ModuleTensors
from pegboard_model_transformers.names import Names


class TransformersMultiModal(TransformersModel):
    """The stages of a `Model`, and `encode` for images."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_vision(config, build.alone())

    def build_vision(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        whole = make_whole(config, getattr(torch, build.dtype))
        base = whole.base_model
        names = Names(whole)
        language = language_path(base)
        width = whole.config.get_text_config(decoder=True).hidden_size
        check_merge(whole, language, width)
        head = whole.get_output_embeddings()
        for path, module in list(whole.named_modules()):
            if module is head:
                whole.set_submodule(path, nn.Identity())
        base.set_submodule(language, nn.Identity())
        targets = [*whole.state_dict()]
        make_buffers(whole, build.device)
        ModuleTensors(build, whole, targets, names)
        self.vision = base.eval()
        self.arguments = frozenset(inspect.signature(base.get_image_features).parameters)
        self.dtype = getattr(torch, build.dtype)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: the arrays of transformers' processor → [rows, hidden] of each. The model gets
        those that its `get_image_features` takes."""
        return [self.rows({n: v for n, v in item.items() if n in self.arguments}) for item in items]

    def rows(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [rows, hidden] of one image."""
        given = {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in arrays.items()
        }
        features = self.vision.get_image_features(**given, return_dict=True).pooler_output
        parts = [features] if isinstance(features, Tensor) else features
        return torch.cat([part.flatten(0, -2) for part in parts])


def make_whole(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the model with its tower on the meta device. Raises ModelError if transformers has
    none, or if it computes rows in a way of its own."""
    parsed = parsed_config(config)
    kinds = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    kind: Any = next((each[type(parsed)] for each in kinds if type(parsed) in each), None)
    if kind is None:
        raise ModelError(
            f"transformers has no model for model_type {parsed.model_type!r} that reads images"
        )
    whole = built_on_meta(kind, parsed, dtype)
    base = whole.base_model
    takes_rows = "mm_encoder_outputs" in inspect.signature(base.forward).parameters
    if base is whole or not takes_rows or not hasattr(base, "get_image_features"):
        raise ModelError(
            f"{kind.__name__} does not put the rows of an image into its prompt; it needs its own "
            "model plugin"
        )
    if hasattr(base, "get_rope_index"):
        raise ModelError(
            f"{kind.__name__} gives the tokens of an image positions with several axes; it needs "
            "its own model plugin"
        )
    return whole


def language_path(base: nn.Module) -> str:
    """Return the path of the language model in a base model."""
    decoder = getattr(base, "language_model", None) or getattr(base, "text_model", None)
    for path, module in base.named_modules():
        if module is decoder:
            return path
    raise ModelError(
        f"{type(base).__name__} has no module for its language model; it needs its own model plugin"
    )


class Recorder(nn.Module):
    """Takes the place of a language model, and raises its arguments. Its embeddings are numbered:
    token i has a row of i."""

    def __init__(self, inner: Any, width: int) -> None:
        super().__init__()
        self.config = inner.config
        self.width = width

    def embed(self, ids: Tensor) -> Tensor:
        return ids[..., None].float().expand(*ids.shape, self.width)

    def get_input_embeddings(self) -> Any:
        return self.embed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise Reached({**dict(enumerate(args)), **kwargs})


class Reached(Exception):
    """The language model was called with these arguments."""

    def __init__(self, given: Mapping[Any, Any]) -> None:
        super().__init__()
        self.given = given


def check_merge(whole: Any, language: str, width: int) -> None:
    """Raise ModelError unless the model does nothing but replace the embeddings of image tokens by
    rows."""
    base = whole.base_model
    name = type(whole).__name__
    inner = base.get_submodule(language)
    image = next(
        (
            getattr(whole.config, key)
            for key in ("image_token_id", "image_token_index")
            if getattr(whole.config, key, None) is not None
        ),
        None,
    )
    if image is None:
        raise ModelError(f"the checkpoint's config of {name} has no image_token_id")
    text = (1, 2, 3) if image > 3 else (4, 5, 6)
    ids = torch.tensor([[text[0], text[1], image, image, image, text[2]]])
    rows = -torch.arange(1.0, 4.0)[:, None].expand(3, width)
    recorder = Recorder(inner, width)
    expected = recorder.embed(ids).clone()
    expected[0, 2:5] = rows
    trouble = ""
    for given in ((rows,), rows[None], rows):
        base.set_submodule(language, recorder)
        try:
            base.get_input_embeddings = recorder.get_input_embeddings
            base.forward(
                input_ids=ids,
                use_cache=False,
                mm_encoder_outputs={"image": BaseModelOutputWithPooling(pooler_output=given)},
            )
        except Reached as call:
            trouble = _extras(call.given, expected)
            break
        except Exception as error:  # noqa: BLE001 - modeling code can raise anything
            trouble = f"does not take rows: {type(error).__name__}: {error}"
        finally:
            base.set_submodule(language, inner)
            del base.get_input_embeddings
    if trouble:
        raise ModelError(f"{name} {trouble}; it needs its own model plugin")


def _extras(call: Mapping[Any, Any], expected: Tensor) -> str:
    """Return what a call of the language model has beside the merged embeddings, "" = nothing."""
    positions = torch.arange(expected.shape[1])[None]
    extra = [
        str(name)
        for name, value in call.items()
        if name != "inputs_embeds"
        and value is not None
        and not isinstance(value, bool)
        and not (isinstance(value, Tensor) and torch.equal(value, positions))
    ]
    if extra:
        return f"gives its language model {', '.join(extra)} for an image"
    merged = call.get("inputs_embeds")
    if merged is None or merged.shape != expected.shape or not torch.equal(merged, expected):
        return "does more with rows than to put them into the prompt"
    return ""

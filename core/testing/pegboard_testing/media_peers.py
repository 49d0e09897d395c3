"""What tests of processors compare with: processors of transformers, and setups of small
checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.contract_multimodal_processor import (
    MultiModalProcessorContract,
    random_image,
)

LETTERS = ["<unk>", "a"]
MOST = 150
"""The longest side of images in these tests."""
THINNEST = 50
"""How many times a side may be as long as the other. Peers fail for thinner images."""


class ImageContract(MultiModalProcessorContract):
    """The contract tests of a processor of images. make: (folder) → the processor, whose files it
    writes there. config, special: see `image_setup`. sizes: of the images."""

    make: Callable[[Path], Any]
    config: Mapping[str, Any]
    special: Sequence[str]
    sizes: Sequence[tuple[int, int]] = ((20, 30), (7, 50), (9, 9))

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def tokenizer(self) -> Any:
        return image_setup(self.path, self.config, self.special).tokenizer

    def processor(self) -> Any:
        return self.make(self.path)

    def items(self) -> list[tuple[str, Any]]:
        return [("image", random_image(*size)) for size in self.sizes]


def random_images() -> Any:
    """Return a strategy that makes images of random pixels and sizes."""
    from hypothesis import strategies as st

    sides = st.tuples(st.integers(1, MOST), st.integers(1, MOST), st.integers(0, 99))
    usable = sides.filter(lambda drawn: max(drawn[:2]) <= THINNEST * min(drawn[:2]))
    return usable.map(lambda drawn: random_image(*drawn))


def random_audio(shortest: float, longest: float) -> Any:
    """Return a strategy that makes float32 noise [samples] of 16,000 samples per second. shortest,
    longest: in seconds."""
    from hypothesis import strategies as st

    def made(count: int, seed: int, loudness: float) -> np.ndarray:
        random = np.random.default_rng(seed)
        return np.asarray(random.normal(size=count) * loudness, np.float32)

    counts = st.integers(max(1, round(shortest * 16_000)), round(longest * 16_000))
    return st.builds(made, counts, st.integers(0, 99), st.sampled_from([1e-3, 0.1, 1.0]))


def check_image(theirs: Any, ours: Any, mark: str, image: Any, *, is_batched: bool) -> Any:
    """Check that our processor makes the pixels and tokens that transformers' makes, and return
    our result. mark: stands for the image. is_batched: the pixels of transformers' have one
    more dimension."""
    expected = theirs(images=image, text=f"a {mark} a", return_tensors="np")
    processed = ours.process("image", image, {})
    pixels = expected["pixel_values"]
    np.testing.assert_array_equal(
        processed.arrays["pixel_values"], pixels[0] if is_batched else pixels
    )
    assert processed.arrays["pixel_values"].dtype == np.float32
    (a,) = theirs.tokenizer.encode("a")
    assert [a, *processed.token_ids, a] == expected["input_ids"][0].tolist()
    assert processed.is_row.tolist() == [token == ours.token for token in processed.token_ids]
    return processed


def check_placeholder(theirs: Any, ours: Any) -> None:
    """Check that the placeholder's text has its tokens."""
    placeholder = ours.placeholder("image")
    assert tuple(theirs.tokenizer.encode(placeholder.text)) == placeholder.token_ids


def word_tokenizer(special: Sequence[str]) -> Any:
    """Return a tokenizer of transformers that knows "a" (1), and special tokens from 2 on."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: place for place, word in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>")


class PeerTokenizer:
    """A tokenizer of transformers, as processors use it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the ids."""
        text: str = self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def image_setup(
    folder: Path, config: Mapping[str, Any], special: Sequence[str]
) -> MultiModalProcessorSetup:
    """Return what a processor is built of: a folder's files, a config, and `word_tokenizer`."""
    tokenizer: Any = PeerTokenizer(word_tokenizer(special))
    checkpoint = Checkpoint(
        format="safetensors",
        path=folder,
        config=config,
        architectures=(),
        tensors={},
        tokenizer=TokenizerPayload("hf", folder),
    )
    return MultiModalProcessorSetup(checkpoint, tokenizer)


def pixtral_processor(tokenizer: Any, *, patch_size: int, merged: int, longest_edge: int) -> Any:
    """Return Pixtral's processor of transformers. Its module takes one function from the module of
    the image processor that needs torchvision; here it gets that of the one with PIL."""
    from transformers.models.pixtral import image_processing_pil_pixtral as pil

    name = "transformers.models.pixtral.image_processing_pixtral"
    stand_in: Any = ModuleType(name)
    stand_in.get_resize_output_image_size = pil.get_resize_output_image_size
    with mock.patch.dict(sys.modules, {name: stand_in}):
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor
    return PixtralProcessor(
        image_processor=pil.PixtralImageProcessorPil(size={"longest_edge": longest_edge}),
        tokenizer=tokenizer,
        patch_size=patch_size,
        spatial_merge_size=merged,
    )


def idefics3_processor(images: Any, tokenizer: Any, *, rows: int) -> Any:
    """Return the processor of transformers for Idefics 3. That for SmolVLM writes the same
    prompts, and needs packages for video."""
    from transformers import Idefics3Processor

    return Idefics3Processor(images, tokenizer, image_seq_len=rows)


def internvl_processor(images: Any, tokenizer: Any, *, rows: int) -> Any:
    """Return the processor of transformers for InternVL, without the part for video, which needs
    torchvision."""
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    for name, text in (
        ("start_image", "<img>"),
        ("end_image", "</img>"),
        ("context_image", "<IMG_CONTEXT>"),
        ("video", "<video>"),
    ):
        setattr(tokenizer, f"{name}_token", text)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))

    class ImagesOnly(InternVLProcessor):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

        def check_argument_for_proper_class(self, *given: Any) -> Any:
            return None

    return ImagesOnly(images, tokenizer, None, image_seq_length=rows)


def fuyu_processor(images: Any, tokenizer: Any) -> Any:
    """Return the processor of transformers for Fuyu. It wants an image processor of tensors."""
    from transformers import FuyuProcessor

    cut = images.patchify_image

    def patches(image: Any, patch_size: Any) -> Any:
        return image.new_tensor(cut(image.numpy(), patch_size))[None]

    images.patchify_image = patches

    class WithImages(FuyuProcessor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, *given: Any) -> Any:
            return None

    return WithImages(images, tokenizer)

"""The head of a decoder that classifies, in place of the one for text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ConfigError
from pegboard.layers.build import Build
from pegboard.layers.embedding import Head
from pegboard.layers.linear import Linear


class ClassHead(nn.Module):
    """[N, width] → [N, num_classes] float32. paths: of its linear layers in the checkpoint, in
    order. ReLU is between them, and all but the last keep the width. A layer has a bias if the
    checkpoint has one. No adapter changes it, because it also computes other rows than those that
    a step samples. build: of a model whose layers are all declared. Raises ConfigError if that
    has no head for text."""

    def __init__(self, build: Build, paths: Sequence[str], num_classes: int) -> None:
        super().__init__()
        replaced = next((each for each in build.declared.layers if isinstance(each, Head)), None)
        if replaced is None:
            raise ConfigError("the model has no head for text that classes could replace")
        width = replaced.width
        build = replace(build, has_text_head=True).without_adapters()
        *inner, last = [(build.at(path), f"{path}.bias" in build.stored) for path in paths]
        self.inner = [Linear(at.alone(), width, width, bias=bias) for at, bias in inner]
        self.last = Head(last[0], num_classes, width, bias=last[1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the values of the classes."""
        for layer in self.inner:
            hidden = functional.relu(layer(hidden))
        values: Tensor = self.last(hidden)
        return values

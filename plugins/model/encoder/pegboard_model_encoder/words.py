"""Heads of encoders that predict words under a mask. SPLADE makes vectors of their logits (Formal
et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, Embedding, Head, Layer, LayerNorm, Linear, read, size_of
from pegboard.layers.build import PlainTensor
from pegboard_model_encoder.bert import Bert, DistilBert, MPNet, Roberta
from pegboard_model_encoder.modernbert import ModernBert
from pegboard_model_encoder.parts import activation_of, flag_of


class WordBias(Layer):
    """[N, V] logits → the same with the bias of each token added in place. name: of the tensor."""

    def __init__(self, build: Build, name: str, vocab_size: int) -> None:
        super().__init__(build)
        self.name = name
        self.shape = (vocab_size,)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        self.table = PlainTensor(
            {self.name: (0, self.shape[0])}, self.shape, self.build, dtype="float32"
        )
        return [WantedWeight(self.name, self.shape)]

    def accept(self, piece: WeightPiece) -> None:
        self.table.accept(piece)

    def bind(self) -> None:
        bias = self.table.data
        self.forward = lambda logits: logits.add_(bias)


class Encoder(Protocol):
    """What a head for words needs of the model below it."""

    words: Embedding


class WordHead(nn.Module):
    """[N, hidden] → [N, V] float32: words(norm(activation(dense(x)))) and a bias. paths: of dense,
    norm and words. bias: the name of its tensor; "" = there is none. The matrix is the table of the
    embedding, unless the config has tie_word_embeddings=False."""

    def __init__(
        self,
        config: Mapping[str, Any],
        build: Build,
        below: Encoder,
        norm: Callable[[Build], LayerNorm],
        *,
        paths: tuple[str, str, str],
        size: int,
        activation: str,
        bias: str,
        has_dense_bias: bool = True,
    ) -> None:
        super().__init__()
        dense, norm_path, words = paths
        vocab_size = size_of(config, "vocab_size")
        plain = build.without_adapters()
        self.dense = Linear(plain.at(dense), size, size, bias=has_dense_bias)
        self.activation = activation_of(activation)
        self.norm = norm(plain.at(norm_path))
        tied = below.words if flag_of(config, "tie_word_embeddings", True) else None
        self.words = Head(plain.at(words), vocab_size, size, tied=tied)
        self.bias = WordBias(plain, bias, vocab_size) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.words(self.norm(self.activation(self.dense(hidden))))
        return logits if self.bias is None else self.bias(logits)


class BertWords(Bert):
    """`logits` returns those of words, or its input if the engine makes vectors without them."""

    paths = (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
    )
    bias = "cls.predictions.bias"
    activation = ""
    """Of the head; "" = that of the feed-forward blocks."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        sizes = self.sizes(config)
        self.head = None
        if build.has_text_head:
            self.head = WordHead(
                config,
                build,
                self,
                lambda at: LayerNorm(at, sizes.hidden_size, sizes.eps),
                paths=self.paths,
                size=sizes.hidden_size,
                activation=self.activation or sizes.activation,
                bias=self.bias,
            )

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float() if self.head is None else self.head.forward(hidden)


class RobertaWords(BertWords, Roberta):
    paths = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")
    bias = "lm_head.bias"
    activation = "gelu"


class MPNetWords(BertWords, MPNet):
    paths = RobertaWords.paths
    bias = "lm_head.bias"
    activation = "gelu"


class DistilBertWords(BertWords, DistilBert):
    paths = ("vocab_transform", "vocab_layer_norm", "vocab_projector")
    bias = "vocab_projector.bias"


class ModernBertWords(ModernBert):
    """See `BertWords`."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        self.head = None
        if build.has_text_head:
            self.head = WordHead(
                config,
                build,
                self,
                self.sizes.norm,
                paths=("head.dense", "head.norm", "decoder"),
                size=self.sizes.hidden_size,
                activation=read(config, "classifier_activation", str) or "gelu",
                bias="decoder.bias" if flag_of(config, "decoder_bias", True) else "",
                has_dense_bias=flag_of(config, "classifier_bias", False),
            )

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float() if self.head is None else self.head.forward(hidden)

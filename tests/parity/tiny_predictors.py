"""Tiny checkpoints with a layer that predicts one token more (MTP), and what it should propose,
computed by plain torch over the whole text.

The layers are those of transformers: a model is written with one layer more, which becomes that of
the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from torch import Tensor, nn

from pegboard import LLM

Tensors = dict[str, Tensor]
LAYERS = 3
HIDDEN = 32
VOCAB = 131


@dataclass
class Form:
    """Where the tensors of the prediction are, and how it is computed. layer: what the names of its
    decoder layer begin with. norm: None = the head's input is not normalized."""

    layer: str = f"model.layers.{LAYERS}."
    embedding_norm: str = f"model.layers.{LAYERS}.enorm"
    hidden_norm: str = f"model.layers.{LAYERS}.hnorm"
    projection: str = f"model.layers.{LAYERS}.eh_proj"
    norm: str | None = f"model.layers.{LAYERS}.shared_head.norm"
    embedding: str | None = None
    head: str | None = None
    hidden_first: bool = False
    masks_first: bool = True
    gives_normed: bool = True
    eps: float = 1e-6


@dataclass
class Predictor:
    """A target and its prediction. block: (inputs [1, T, hidden]) → the same after the layer.
    layer: of transformers, which `block` computes. draft: the checkpoint of the prediction, None =
    the target's."""

    directory: Path
    model: Any
    block: Callable[[Tensor], Tensor]
    form: Form
    tensors: Tensors = field(default_factory=dict)
    draft: Path | None = None
    layer: Any = None

    def proposals(self, text: list[int], count: int) -> list[int]:
        """Return the drafts after a text, whose last token the target has not computed."""
        form = self.form
        with torch.no_grad():
            states = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
        given = states[0, : len(text) - 1]
        tokens = text[1:]
        drafts: list[int] = []
        table = self.tensors[form.embedding or "model.embed_tokens"]
        head = self.tensors[form.head or "lm_head"]
        for _ in range(count):
            embedded = table[torch.tensor(tokens)].clone()
            if form.masks_first:
                embedded[0] = 0
            halves = [
                self.normed(embedded, form.embedding_norm),
                self.normed(given, form.hidden_norm),
            ]
            joined = torch.cat(halves[::-1] if form.hidden_first else halves, -1)
            with torch.no_grad():
                out = self.block((joined @ self.tensors[form.projection].T)[None])[0, -1:]
            normed = out if form.norm is None else self.normed(out, form.norm)
            drafts.append(int((normed @ head.T).argmax()))
            tokens = [*tokens, drafts[-1]]
            given = torch.cat([given, normed if form.gives_normed else out])
        return drafts

    def normed(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.form.eps).rsqrt()
        return x * scale * self.tensors[name]


def causal(length: int) -> Tensor:
    """Return the mask of a text, which is added to scores."""
    return torch.full((1, 1, length, length), torch.finfo(torch.float32).min).triu(1)


def block_of(model: Any, layer: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """Return what computes a layer of transformers, with the rotation of its model."""

    def block(hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        out = layer(
            hidden,
            attention_mask=causal(hidden.shape[1]),
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(hidden, positions),
        )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    return block


def write_predictor(
    folder: Path,
    model: Any,
    form: Form,
    block: Callable[[Tensor], Tensor],
    tensors: Tensors,
    config: dict[str, Any],
    *,
    is_right: bool = False,
) -> Predictor:
    """Write a checkpoint with the tensors of the prediction's parts. tensors: of everything else.
    is_right: the target's next token depends on the last one only, and the prediction is right."""
    parts = {
        name: torch.randn(HIDDEN) * 0.1 + 1 for name in (form.embedding_norm, form.hidden_norm)
    }
    parts[form.projection] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.2
    for name in (form.embedding, form.head):
        if name:
            parts[name] = torch.randn(VOCAB, HIDDEN)
    if form.norm:
        parts[form.norm] = torch.randn(HIDDEN) * 0.1 + 1
    stored = {**tensors, **{f"{name}.weight": part for name, part in parts.items()}}
    if is_right:
        make_right(model, stored, form)
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name.removesuffix(".weight"): tensor for name, tensor in stored.items()}
    return Predictor(folder, model, block, form, whole)


def make_right(model: Any, stored: Tensors, form: Form) -> None:
    """No layer adds anything, and the prediction is the target's function of the next token."""
    for name in stored:
        if "o_proj." in name or "down_proj" in name:
            stored[name] = torch.zeros_like(stored[name])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj." in name or "down_proj" in name:
                parameter.zero_()
    halves = [torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)]
    projection = torch.cat(halves[::-1] if form.hidden_first else halves, 1)
    stored[f"{form.projection}.weight"] = projection
    stored[f"{form.embedding_norm}.weight"] = torch.ones(HIDDEN)
    norm = form.norm or form.embedding_norm
    stored[f"{norm}.weight"] = stored["model.norm.weight"].clone()
    for name, shared in ((form.embedding, "model.embed_tokens"), (form.head, "lm_head")):
        if name:
            stored[f"{name}.weight"] = stored[f"{shared}.weight"].clone()


def split_off(
    folder: Path, model_type: str, form: Form, count: str = "num_hidden_layers", **values: Any
) -> tuple[Any, nn.Module, Tensors, dict[str, Any]]:
    """Return a target of transformers, the layer that follows its last one, all tensors under their
    names, and the config. count: what the config calls the number of layers."""
    values = {count: LAYERS + 1, "tie_word_embeddings": False, **values}
    model = make_model(model_type, **values)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    before = f"model.layers.{LAYERS}."
    tensors = {
        name.replace(before, form.layer) if name.startswith(before) else name: tensor
        for name, tensor in stored.items()
    }
    layer = model.model.layers[LAYERS]
    model.model.layers = model.model.layers[:LAYERS]
    setattr(model.config, count, LAYERS)
    config = json.loads((folder / "config.json").read_text())
    config[count] = LAYERS
    config["num_nextn_predict_layers"] = 1
    for name in ("mlp_layer_types", "layer_types"):
        if config.get(name):
            config[name] = config[name][:LAYERS]
    return model, layer, tensors, config


@dataclass
class Proposed:
    """What a proposer has proposed: the text of a row, and the drafts."""

    text: list[int]
    drafts: list[int]


def watch(llm: LLM) -> list[Proposed]:
    """Return a list to which all proposals of this engine are added."""
    proposer = llm.llm_engine.engine._parts.executor.worker.running.ending.proposer
    proposed: list[Proposed] = []
    propose = proposer.propose

    def watched(step: Any) -> Any:
        drafts = propose(step)
        for text, token_ids in zip(step.history, drafts.token_ids, strict=True):
            proposed.append(Proposed(np.array(text).tolist(), np.array(token_ids).tolist()))
        return drafts

    proposer.propose = watched
    return proposed

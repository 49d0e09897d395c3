"""A rank reads only its rows and columns of a plain checkpoint, which is mapped into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import pytest
import tiny_models
import torch
from pegboard_weight_loader_safetensors.loader import SafetensorsLoader
from tiny_models import divide, open_llm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pegboard.interfaces.weight_loader import Checkpoint, WantedWeight, WeightPiece

DIVIDED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


class Reads(TorchDispatchMode):
    """Counts the bytes of each piece that operations of this thread read. Views read nothing.
    read: tensor name → bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, range] = {}
        self.read: Counter[str] = Counter()

    def add(self, piece: WeightPiece) -> None:
        assert isinstance(piece.data, torch.Tensor)
        start = piece.data.data_ptr()
        self.places[piece.name] = range(start, start + piece.data.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        for name, place in self.places.items():
            if tensor.data_ptr() in place:
                self.read[name] += tensor.nbytes


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_of_a_rank(
    write: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Together, the ranks read every value of a matrix once."""
    reference = write(
        "llama",
        hidden_size=48,
        intermediate_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        tie_word_embeddings=False,
    )
    counts: list[Reads] = []
    boxes: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    stream = SafetensorsLoader.tensors

    def counted(
        loader: SafetensorsLoader, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        wanted = list(wanted)
        for weight in wanted:
            entry = checkpoint.tensors[weight.name]
            each = entry.num_bytes // prod(entry.shape)
            sizes[weight.name] = entry.num_bytes
            whole = (tuple((0, size) for size in entry.shape),)
            for box in weight.boxes or whole:
                boxes[weight.name] += each * prod(stop - start for start, stop in box)
        counts.append(reads := Reads())
        with reads:
            for piece in stream(loader, checkpoint, wanted):
                reads.add(piece)
                yield piece

    monkeypatch.setattr(SafetensorsLoader, "tensors", counted)
    monkeypatch.setattr(tiny_models, "only_boxes", lambda tensors: tensors)  # it copies
    divide(monkeypatch, ranks)
    with open_llm(reference.directory):
        pass
    assert len(counts) == ranks
    read: Counter[str] = Counter()
    for each in counts:
        read.update(each.read)
    assert read == boxes
    matrices = [name for name in read if any(part in name for part in DIVIDED)]
    assert len(matrices) > len(DIVIDED)
    assert all(read[name] == sizes[name] for name in matrices)
    for each in counts:
        held = sum(each.read[name] for name in matrices)
        assert held * ranks <= 1.3 * sum(sizes[name] for name in matrices)

"""A checkpoint whose weights the ranks cannot divide is refused before its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from pegboard_weight_loader_safetensors.loader import SafetensorsLoader
from stored_layouts import quantize
from tiny_models import divide, open_llm

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint, WantedWeight, WeightPiece

ACT_ORDER = r"down_proj.weight has its columns in another order \(act order\), so ranks cannot"
TRANSFORMED = r"proj.weight was quantized for activations that are transformed, so ranks cannot"
BLOCKS = r"tensor .*_proj.weight has blocks of 32, which the ranks cannot divide"
STATE = ".quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("case", "channels", "ending", "message"),
    [
        ("gptq in act order", 96, ".g_idx", "o_proj.weight has its columns|" + ACT_ORDER),
        ("pack-quantized in act order", 96, ".weight_g_idx", "o_proj.weight has|" + ACT_ORDER),
        ("fp_quant", 96, None, TRANSFORMED),
        ("modelopt awq", 96, None, TRANSFORMED),
        ("int-quantized, turned", 96, None, TRANSFORMED),
        ("fp8 in blocks", 160, None, BLOCKS),
        ("gptq", 160, ".g_idx", BLOCKS),
        ("hqq", 160, None, BLOCKS),
        ("bitsandbytes", 160, STATE, BLOCKS),
    ],
)
def test_no_weight_is_read(
    write: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    channels: int,
    ending: str | None,
    message: str,
) -> None:
    """ending: of the only tensors that are read, which say how a weight is stored."""
    reference = write("llama", hidden_size=64, intermediate_size=channels)
    quantize(reference, case)
    read: set[str] = set()
    stream = SafetensorsLoader.tensors

    def recorded(
        loader: SafetensorsLoader, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        for piece in stream(loader, checkpoint, wanted):
            read.add(piece.name)
            yield piece

    monkeypatch.setattr(SafetensorsLoader, "tensors", recorded)
    divide(monkeypatch, 2)
    with pytest.raises(ModelError, match=message) as refused, open_llm(reference.directory):
        pass
    assert "; use " in str(refused.value)
    assert all(ending and name.endswith(ending) for name in read), read

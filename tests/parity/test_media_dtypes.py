"""Models with images, audio or video in the types that checkpoints have: their rows are near those
in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from media_families import FAMILIES, ITEMS, processor_of
from tiny_media import open_media_llm
from tiny_models import nightly

from pegboard import SamplingParams
from pegboard.worker.given_rows import GivenRows
from pegboard_weights.hf_files import read_config, with_defaults

OTHERS = {"siglip", "whisper", "onevision"}
"""They answer no prompt with an item, or have a tokenizer for images alone."""
SMALL = {"min_pixels": 64, "max_pixels": 1024}
"""Images of models whose patches are tiny here."""
ERROR = 0.03
"""The largest mean error of a row, in parts of its mean size."""


def rows_of(folder: Path, prompts: list[Any], dtype: str, monkeypatch: Any) -> torch.Tensor:
    """Return the rows that an engine makes of the items of prompts, below each other."""
    rows: list[torch.Tensor] = []
    encode = GivenRows.encode

    def kept(self: GivenRows, batch: Any) -> None:
        encode(self, batch)
        rows.extend(self.encoded[each.digest].float() for each in batch.encode)

    params = SamplingParams(max_tokens=2, temperature=0)
    sizes = {"max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 64 << 20}
    with monkeypatch.context() as patch:
        patch.setattr(GivenRows, "encode", kept)
        with open_media_llm(folder, dtype=dtype, **sizes) as llm:
            llm.generate(prompts, params, use_tqdm=False)
    return torch.cat(rows)


@pytest.mark.sampled(6)
@pytest.mark.one_rank
@pytest.mark.parametrize("dtype", nightly(["bfloat16", "float16"], "float16"))
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - OTHERS))
def test_rows(tmp_path: Path, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES[name](tmp_path)
    processor, modalities = processor_of(tmp_path, with_defaults(read_config(tmp_path)))
    options = {"mm_processor_kwargs": SMALL} if "omni" in name else {}
    prompts = [
        {
            **options,
            "prompt": f"w5 {processor.placeholder(modality).text} w6",
            "multi_modal_data": {modality: [ITEMS[modality]]},
        }
        for modality in modalities
    ]
    expected = rows_of(tmp_path, prompts, "float32", monkeypatch)
    rows = rows_of(tmp_path, prompts, dtype, monkeypatch)
    error = (rows - expected).abs().mean() / expected.abs().mean()
    assert rows.isfinite().all() and error < ERROR, f"{dtype}: {error:.3f}"

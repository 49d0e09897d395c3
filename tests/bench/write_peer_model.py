"""Write a GGUF file as a Hugging Face directory, for peers that do not read GGUF.

    python tests/bench/write_peer_model.py MODEL.gguf DIRECTORY

Needs the packages gguf, safetensors and transformers (for the tokenizer). The weights are
dequantized to float32, so every side computes with the same numbers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from pegboard.config.schema import EngineConfig, Settings
from pegboard.plan.engine_plan import resolve


def write(source: Path, target: Path) -> None:
    """Write the directory. transformers and vLLM can load it."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    checkpoint = resolve(Settings(engine=EngineConfig(model=str(source))))[0].checkpoint
    stored = {tensor.data_offset: tensor for tensor in GGUFReader(source).tensors}
    weights = {}
    for name, entry in checkpoint.tensors.items():
        tensor = stored[entry.offset]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).reshape(
            entry.shape
        )
        if checkpoint.rope_style == "pairs" and (".q_proj." in name or ".k_proj." in name):
            values = _pairs_to_halves(values, checkpoint.config["head_dim"])
        weights[name] = values.float().contiguous()
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(
        json.dumps({**checkpoint.config, "dtype": "float32"}, indent=1)
    )
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: write_peer_model.py MODEL.gguf DIRECTORY")
    write(Path(sys.argv[1]), Path(sys.argv[2]))


def _pairs_to_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head. GGUF rotates neighboring channels together, but Hugging Face
    rotates channel i with i + head_dim / 2."""
    columns = weight.shape[1]
    return weight.view(-1, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(-1, columns)


if __name__ == "__main__":
    main()

"""Runs in an environment with vLLM, for load_formats.py: reads a checkpoint once for each line on
its stdin, as vLLM's own loader does, and copies each tensor once.

    python read_with_vllm.py FOLDER ROWS COLUMNS

It first prints vLLM's version, and then a line after each reading."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import vllm
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator


def main() -> None:
    folder, rows, columns = sys.argv[1:]
    files = [str(path) for path in sorted(Path(folder).glob("*.safetensors"))]
    target = torch.empty(int(rows), int(columns), dtype=torch.bfloat16)
    target.zero_()
    print(vllm.__version__, flush=True)
    for _ in sys.stdin:
        for _, value in safetensors_weights_iterator(files, use_tqdm_on_load=False):
            target.copy_(value)
        print("done", flush=True)


if __name__ == "__main__":
    main()

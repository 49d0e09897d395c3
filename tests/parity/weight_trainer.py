"""A trainer: for each folder that it reads from stdin, it prints the `update_info` and sends the
weights. The next line ends the update. Words: shared_memory, or torch PORT WORLD_SIZE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pegboard_weight_transfer_shared_memory.trainer import shared
from pegboard_weight_transfer_torch.trainer import Trainer, described
from safetensors.torch import load_file


def main(backend: str, *words: str) -> None:
    trainer = Trainer(int(words[0]), world_size=int(words[1])) if words else None
    while line := sys.stdin.readline():
        weights = load_file(Path(line.strip()) / "model.safetensors")
        if trainer is not None:
            print(json.dumps(described(weights)), flush=True)
            trainer.send(weights)
            sys.stdin.readline()
            continue
        with shared(weights) as update_info:
            print(json.dumps(update_info), flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Writes what the towers of the package timm compute with seeded weights.

    python write_with_timm.py FOLDER

It runs in an environment with torch, timm and safetensors, without Pegboard. The folder gets
`small.safetensors` and `whole.safetensors`: rows [256, 2048] of each image, by its name. It also
gets mobilenet_v5.json, which is beside this file: some numbers of the small tower.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from seeded_tower import SMALL, STEM, STEP, images, seeded
from timm.layers import RmsNorm2d
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.mobilenetv5 import MobileNetV5Encoder
from torch import Tensor, nn


def small_tower() -> Any:
    """Return a tower with the same kinds of blocks as the whole one, and few channels."""
    return MobileNetV5Encoder(
        decode_arch_def(SMALL),
        stem_size=STEM,
        pad_type="same",
        round_chs_fn=partial(round_channels, multiplier=1.0),
        norm_layer=RmsNorm2d,
        act_layer=partial(nn.GELU, approximate="tanh"),
        layer_scale_init_value=1e-5,
    )


@torch.no_grad()
def rows_of(tower: Any, name: str) -> dict[str, Tensor]:
    """Return the rows of each image. name: of the tower."""
    tower.eval()
    tower.load_state_dict(seeded({key: value.shape for key, value in tower.state_dict().items()}))
    return {
        key: tower(pixels[None])[0].flatten(1).T.contiguous()
        for key, pixels in images(name).items()
    }


def main(folder: Path) -> None:
    small = rows_of(small_tower(), "small")
    save_file(small, folder / "small.safetensors")
    save_file(
        rows_of(timm.create_model("mobilenetv5_300m_enc"), "whole"), folder / "whole.safetensors"
    )
    rows, channels = STEP
    kept = {key: value[::rows, ::channels].tolist() for key, value in small.items()}
    digits = {key: [[round(n, 6) for n in row] for row in table] for key, table in kept.items()}
    text = json.dumps({"timm": timm.__version__, "rows": digits}, indent=None)
    (folder / "mobilenet_v5.json").write_text(
        text.replace("]], ", "]],\n").replace("], [", "],\n[") + "\n"
    )


main(Path(sys.argv[1]))

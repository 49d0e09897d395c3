"""docs/load_formats.md says of every load format and source what is true of the packages here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from pegboard.config.schema import EngineConfig
from pegboard.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/load_formats.md").read_text(encoding="utf-8")
VLLM = [
    "auto",
    "hf",
    "pt",
    "safetensors",
    "npcache",
    "dummy",
    "tensorizer",
    "sharded_state",
    "gguf",
    "bitsandbytes",
    "mistral",
    "runai_streamer",
    "runai_streamer_sharded",
    "fastsafetensors",
    "instanttensor",
    "ipc_cache",
    "modelexpress",
]


def plugins(kind: str) -> dict[str, str]:
    """Return the distribution of each plugin of a kind."""
    providers = {}
    for path in ROOT.glob("plugins/*/*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for name in project.get("entry-points", {}).get(f"pegboard.{kind}.v1", {}):
            providers[name] = project["name"]
    return providers


def rows() -> dict[str, tuple[str, str]]:
    """Return what the page says of each name, and the package."""
    table = {}
    for line in PAGE.split("## Times")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3:
            for name in re.findall(r"`([^`]+)`", cells[0]) if cells[0] != "`--load-format`" else ():
                table[name] = (cells[1], cells[2].strip("`"))
    return table


@pytest.mark.parametrize("name", VLLM)
def test_every_load_format_of_vllm_is_listed_rightly(name: str) -> None:
    says, package = rows()[name]
    if says.startswith("refused"):
        with pytest.raises(ConfigError, match=f"load_format {name}: "):
            EngineConfig(load_format=name)
        return
    ours = EngineConfig(load_format=name).load_format
    assert says.startswith("works")
    if ours != "auto":
        assert plugins("weight_loader")[ours] == package


def test_every_loader_and_source_is_listed() -> None:
    assert plugins("weight_loader").keys() <= rows().keys()
    schemes = {name.partition(":")[0] for name in rows()}
    assert plugins("model_source").keys() - {"local"} <= schemes

"""Every code block of the pages is real: quoted from a file, executed, or read by the program that
it is written for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from page_server import HUB_MODEL, PATIENCE_S
from pages import PAGES, ROOT, Block, blocks

from pegboard.config.sources import read_config_file, settings_from

ALL = [block for page in PAGES for block in blocks(page)]
QUOTED = [block for block in ALL if block.source]
SCRIPTS = [
    block
    for block in ALL
    if not block.source
    and (
        block.language == "python"
        or (not block.language and block.text.startswith(("from ", "import ")))
    )
]
CONFIG_FILES = [block for block in ALL if not block.source and block.language == "toml"]
LANGUAGES = {"", "text", "console", "python", "python notest", "toml", "yaml", "json"}


def place(block: Block) -> str:
    return block.place


def test_every_block_is_of_a_known_sort() -> None:
    assert not [block.place for block in ALL if block.language not in LANGUAGES]
    assert QUOTED and SCRIPTS and CONFIG_FILES


@pytest.mark.parametrize("block", QUOTED, ids=place)
def test_quoted(block: Block) -> None:
    assert block.source is not None
    assert block.text in (ROOT / block.source).read_text("utf-8"), (
        f"{block.place} is not what {block.source} says"
    )


@pytest.mark.parametrize("block", SCRIPTS, ids=place)
def test_executed(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    code = block.text
    if HUB_MODEL in code:
        code = code.replace(HUB_MODEL, str(request.getfixturevalue("smollm2_gguf")))
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", CONFIG_FILES, ids=place)
def test_config_file(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(block.text, "utf-8")
    settings = settings_from([(read_config_file(path), str(path))])
    assert settings.sources, "it sets something"

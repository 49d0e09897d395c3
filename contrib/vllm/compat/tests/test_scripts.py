"""Scripts that only import vllm run unchanged. docs/vllm_scripts.md lists them."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest
from pegboard_vllm_compat.command import prepare

SCRIPTS = Path(__file__).parent / "scripts"
SLOW = {
    "async_llm_stat_loggers",
    "async_llm_streaming",
    "logits_processor_custom_req_init",
    "simple_profiling",
}
"""They start processes, or a profiler."""


def words_of(script: Path) -> list[str]:
    """Return the arguments of a script as its first line says them."""
    usage = script.read_text("utf-8").split("Usage: ", 1)[1].split(".", 1)[0]
    return shlex.split(usage)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in sorted(SCRIPTS.glob("*.py"))
    ],
)
@pytest.mark.usefixtures("vllm")
def test_script(name: str, checkpoints: dict[str, str], tmp_path: Path) -> None:
    script = SCRIPTS / f"{name}.py"
    values = {**checkpoints, "FOLDER": str(tmp_path), "N": "3"}
    prepare(script, [values.get(word, word) for word in words_of(script)], shadow=True)
    runpy.run_path(str(script), run_name="__main__")


PAGE = Path(__file__).parents[4] / "docs/vllm_scripts.md"


def test_the_page_lists_all_scripts() -> None:
    """With what each shows, from its first line."""
    page = PAGE.read_text("utf-8")
    for path in sorted(SCRIPTS.glob("*.py")):
        summary = path.read_text("utf-8").partition('"""')[2].partition('"""')[0]
        row = f"| `{path.stem}` | {summary.partition('. ')[2]} |"
        assert row in page, f"{PAGE} needs the row\n{row}"
    assert page.partition("## Which cannot run")[0].count("\n| `") == len(
        list(SCRIPTS.glob("*.py"))
    )

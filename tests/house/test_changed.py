"""`make check` finds the tests that a change touches."""

from __future__ import annotations

from pathlib import Path

import pytest
from changed import near
from members import CORE, ROOT


@pytest.mark.parametrize(
    ("change", "test", "distance"),
    [
        (CORE / "engine/kv/pool.py", "core/pegboard/tests/test_block_pool.py", 1),
        (CORE / "engine/kv/pool.py", "core/pegboard/tests/test_scheduler.py", 2),
        (
            ROOT / "core/weights/pegboard_weights/packed_integers.py",
            "plugins/quantization/gptq/tests/test_gptq.py",
            2,
        ),
        (
            ROOT / "kernels/cpu/pegboard_kernel_cpu/csrc/attention.c",
            "kernels/cpu/tests/test_attention.py",
            1,
        ),
        (ROOT / "tests/server/server_process.py", "tests/server/test_lifecycle.py", 1),
        (ROOT / "tests/server/test_lifecycle.py", "tests/server/test_lifecycle.py", 0),
        (ROOT / "docs/serving.md", "tests/docs/test_commands.py", 1),
    ],
)
def test_distances(change: Path, test: str, distance: int) -> None:
    found = {file: near_by for near_by, file in near([change])}
    assert found[ROOT / test] <= distance


def test_far_tests_are_left_out_and_near_ones_come_first() -> None:
    found = near([ROOT / "plugins/draft/ngram/pegboard_draft_ngram/proposer.py"])
    assert found == sorted(found)
    assert ROOT / "plugins/quantization/gptq/tests/test_gptq.py" not in {file for _, file in found}

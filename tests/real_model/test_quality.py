"""The default model keeps its quality with any choice of kernels. The long measurement is `python quality.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from quality import compare

pytestmark = pytest.mark.real_model


def test_perplexity_and_greedy_tokens_of_the_default_path(smollm2_gguf: Path) -> None:
    result = compare(str(smollm2_gguf), 1024)
    assert result.num_tokens >= 1000
    assert result.may_be_good, str(result)

"""What the method takes as a draft model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pegboard_draft_draft_model.source import source

from pegboard.errors import ConfigError, ModelError
from pegboard_testing.fake_parts import tiny_checkpoint


def test_the_checkpoint_that_the_user_has_named(tmp_path: Any) -> None:
    target = tiny_checkpoint(tmp_path)
    assert source(target, target).checkpoint is target
    with pytest.raises(ConfigError, match="set spec_model"):
        source(target, None)


def test_vocabularies_of_different_sizes(tmp_path: Any) -> None:
    size = 100
    target = replace(tiny_checkpoint(tmp_path), config={"vocab_size": size})
    within = replace(target, config={"text_config": {"vocab_size": size}})
    assert source(within, target).checkpoint is target
    other = replace(target, config={**target.config, "vocab_size": size + 1})
    with pytest.raises(ModelError, match=f"has {size + 1} tokens, and that of .* has {size}"):
        source(target, other)

"""The logits processor `ban`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pegboard_logits_processor_ban.options import BanOptions
from pegboard_logits_processor_ban.processor import BanProcessor

from pegboard.errors import ConfigError
from pegboard.interfaces.logits_processor import LogitsProcessorSetup
from pegboard_testing.contract_logits_processor import (
    VOCAB_SIZE,
    VOCABULARY,
    LogitsProcessorContract,
)
from pegboard_testing.fake_limits import fake_limits


class TestBan(LogitsProcessorContract):
    name = "ban"
    options = {"token_ids": [2], "texts": ["d"]}


def made(**values: Any) -> BanProcessor:
    setup = LogitsProcessorSetup(fake_limits(vocab_size=VOCAB_SIZE), "cpu", lambda: VOCABULARY)
    return BanProcessor(BanOptions(**values), setup)


def test_ids_and_texts_are_banned_in_every_row() -> None:
    logits = made(token_ids=[2], texts=["d"]).apply(
        torch.zeros(3, VOCAB_SIZE), torch.arange(3), torch.zeros(3), list
    )
    assert (logits == -torch.inf).nonzero().tolist() == [
        [row, token] for row in range(3) for token in (2, 3)
    ]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"token_ids": [VOCAB_SIZE]},
            f"token_ids has {VOCAB_SIZE}, and the model has {VOCAB_SIZE} tokens",
        ),
        ({"texts": ["word"]}, "no token contains 'word'"),
        ({"token_ids": range(VOCAB_SIZE)}, "every token is banned"),
    ],
)
def test_a_wrong_list_stops_the_start(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made(**values)

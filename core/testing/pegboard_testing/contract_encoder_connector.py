"""Contract tests of the kind `encoder_connector`. A plugin's test file:

class TestMyConnector(EncoderConnectorContract):
    def connector(self) -> EncoderConnector:
        return a new connector, which sees what earlier ones have saved
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pegboard.interfaces.encoder_connector import EncoderConnector


def name_of(text: str) -> str:
    """Return a name as core makes them."""
    return hashlib.sha256(text.encode()).hexdigest()


class EncoderConnectorContract:
    """Every encoder connector passes these. Override `connector`."""

    def connector(self) -> EncoderConnector:
        """Return a new connector of another engine, which sees what earlier ones have saved."""
        raise AssertionError("override EncoderConnectorContract.connector")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_another_engine_gets_the_rows(self, dtype: torch.dtype) -> None:
        rows = torch.randn(7, 24).to(dtype)
        first = self.connector()
        first.save(name_of("a"), rows)
        first.close()
        second = self.connector()
        result = second.load(name_of("a"))
        assert result is not None and result.dtype == dtype and torch.equal(result, rows)
        second.close()

    def test_what_was_not_saved_is_not_there(self) -> None:
        connector = self.connector()
        connector.save(name_of("a"), torch.zeros(1, 8))
        assert connector.load(name_of("b")) is None

    def test_rows_may_be_views_and_saved_twice(self) -> None:
        rows = torch.randn(20, 16)
        connector = self.connector()
        part = rows[3:9, ::2]
        for _ in range(2):
            connector.save(name_of("a"), part)
        rows.zero_()
        result = connector.load(name_of("a"))
        assert result is not None and result.shape == (6, 8) and result.abs().sum() > 0

    def test_many_engines_at_once(self) -> None:
        """They save equal rows under a name, as engines with equal models do."""
        rows = [torch.full((3, 8), float(number)) for number in range(10)]

        def work(connector: EncoderConnector) -> bool:
            is_right = True
            for number, given in enumerate(rows * 2):
                name = name_of(str(number % 10))
                connector.save(name, given)
                result = connector.load(name)
                is_right &= result is not None and torch.equal(result, given)
            return is_right

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(work, [self.connector() for _ in range(4)]))

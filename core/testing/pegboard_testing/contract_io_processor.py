"""Contract tests of the kind `io_processor`. A plugin's test file:

class TestMyProcessor(IOProcessorContract):
    good = ({"texts": ["a", "b"]},)
    wrong = ({}, {"texts": 3})

    def processor(self, setup: IOProcessorSetup) -> IOProcessor:
        return MyProcessor(options, setup)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pegboard.data.output import RequestOutput
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.io_processor import IOProcessor, IOProcessorSetup
from pegboard_testing.fake_client import ByteTokenizer

HOSTILE: tuple[Any, ...] = (
    None,
    0,
    -1.5,
    "",
    "text",
    [],
    {},
    [[]],
    {"": None},
    [None] * 3,
    {"data": {"data": {}}},
    True,
)


def output_of(array: np.ndarray, number: int = 0) -> RequestOutput:
    """Return the output of a prompt whose result is this float32 array."""
    return RequestOutput(
        f"test-{number}",
        None,
        [1, 2],
        [],
        True,
        embedding=array.astype(np.float32).tobytes(),
        embedding_shape=array.shape,
    )


class IOProcessorContract:
    """Every IO processor passes these. good, wrong: data of requests. width: the numbers of a
    result."""

    good: Sequence[Any]
    wrong: Sequence[Any] = ()
    width = 8

    def processor(self, setup: IOProcessorSetup) -> IOProcessor:
        """Return a new IO processor."""
        raise AssertionError("override IOProcessorContract.processor")

    def made(self) -> IOProcessor:
        setup = IOProcessorSetup("model", ("no", "yes"), ByteTokenizer)
        return self.processor(setup)

    def processed(self, processor: IOProcessor, data: Any) -> Any:
        """Return the answer to data, with results that depend on the prompts."""
        pairs = list(processor.prompts(data))
        assert pairs, f"no prompts are made of {data!r:.80}"
        outputs = []
        for number, (prompt, params) in enumerate(pairs):
            assert isinstance(prompt, Prompt) and isinstance(params, PoolingParams)
            rows = 3 if (params.task or "").startswith("token_") else None
            shape = (self.width,) if rows is None else (rows, self.width)
            array = np.random.default_rng(number).standard_normal(shape)
            outputs.append(output_of(array, number))
        return processor.answer(data, outputs)

    def test_good_data_is_answered_with_json(self) -> None:
        processor = self.made()
        for data in self.good:
            before = copy.deepcopy(data)
            answer = self.processed(processor, data)
            json.dumps(answer, allow_nan=False)
            assert data == before, "the data of a request is changed"

    def test_requests_at_once_do_not_mix(self) -> None:
        processor = self.made()
        alone = [self.processed(self.made(), data) for data in self.good]
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda data: self.processed(processor, data), self.good * 4))
        assert answers == alone * 4

    def test_wrong_data_is_refused(self) -> None:
        """With errors of which a client learns that its data is wrong."""
        processor = self.made()
        for data in self.wrong:
            with pytest.raises(RequestError) as refusal:
                processor.prompts(data)
            assert refusal.value.parameter == "data"

    def test_any_data_is_answered_or_refused(self) -> None:
        processor = self.made()
        for data in HOSTILE:
            try:
                pairs = processor.prompts(data)
            except RequestError as error:
                assert error.parameter == "data", f"{data!r}: the parameter is {error.parameter!r}"
                continue
            assert all(isinstance(prompt, Prompt) for prompt, _ in pairs)

"""Contract tests of the kind `multimodal_processor`. A plugin's test file:

class TestMyProcessor(MultiModalProcessorContract):
    def tokenizer(self) -> Tokenizer:
        return a tokenizer of the model

    def processor(self) -> MultiModalProcessor:
        return MyProcessor(None, MultiModalProcessorSetup(a checkpoint, self.tokenizer()))

    def items(self) -> list[tuple[str, Any]]:
        return [("image", random_image(20, 30)), …]
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessor,
    Placeholder,
    Processed,
    Question,
    Wish,
)
from pegboard.interfaces.tokenizer import Tokenizer


def random_image(width: int, height: int, seed: int = 0) -> Any:
    """Return an RGB PIL image of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def check_form(
    processor: Any, modality: str, processed: Processed, form: Mapping[str, Sequence[int]]
) -> None:
    """Check that rows with this form have the places of the item's own. Other numbers of rows,
    other forms and unknown names must be refused."""
    arrays = {name: np.array(values, np.int64) for name, values in form.items()}
    is_row = processed.is_row
    count = len(processed.token_ids) if is_row is None else int(is_row.sum())
    placed = processor.place_formed_rows(modality, count, arrays)
    assert isinstance(placed, Processed) and not placed.arrays and placed.facts == processed.facts
    assert [*placed.token_ids] == [*processed.token_ids]
    np.testing.assert_array_equal(placed.is_row, is_row)
    wrong = [(count, {**arrays, "no_such_name": np.ones(1, np.int64)})]
    if form:
        longer = {name: np.append(array, 1) for name, array in arrays.items()}
        negative = {name: -array - 1 for name, array in arrays.items()}
        wrong += [(count, {}), (count, longer), (count, negative), (count + 1, arrays)]
    for number, other in wrong:
        with pytest.raises(RequestError):
            processor.place_formed_rows(modality, number, other)


class MultiModalProcessorContract:
    """Every processor passes these. Override `tokenizer`, `processor` and `items`. row_counts:
    numbers of rows that an item may have."""

    row_counts: Sequence[int] = (1, 7)

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        raise AssertionError("override MultiModalProcessorContract.tokenizer")

    def processor(self) -> MultiModalProcessor:
        """Return a new processor."""
        raise AssertionError("override MultiModalProcessorContract.processor")

    def items(self) -> list[tuple[str, Any]]:
        """Return (modality, value) of items of all modalities and of many sizes."""
        raise AssertionError("override MultiModalProcessorContract.items")

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int | None:
        """Return how many rows the model's `encode` makes of these arrays, if the test can tell."""
        return None

    def form_of(self, modality: str, processed: Processed) -> Mapping[str, Any] | None:
        """Return what a client says of this item beside its rows, if the processor places formed
        rows of this modality."""
        return None

    def process(self, modality: str, value: Any) -> Processed:
        processed = self.processor().process(modality, value, {})
        assert isinstance(processed, Processed), f"process() returned {processed!r:.60}"
        return processed

    def test_a_placeholder_is_in_its_text(self) -> None:
        for modality in {modality for modality, _ in self.items()}:
            placeholder = self.processor().placeholder(modality)
            assert isinstance(placeholder, Placeholder)
            if not placeholder.token_ids or placeholder.is_first:
                assert not placeholder.text, "an item that is not in the prompt has no text"
                continue
            ids = self.tokenizer().encode(placeholder.text, add_special_tokens=False)
            target = list(placeholder.token_ids)
            starts = range(len(ids) - len(target) + 1)
            count = sum(ids[start : start + len(target)] == target for start in starts)
            assert count == 1, f"{placeholder.text!r} is {ids}, which must have {target} once"

    def test_tokens_rows_and_arrays_fit(self) -> None:
        for modality, value in self.items():
            processed = self.process(modality, value)
            tokens = list(processed.token_ids)
            assert tokens and all(type(token) is int and token >= 0 for token in tokens)
            is_row = processed.is_row
            if is_row is not None:
                assert is_row.dtype == bool and is_row.shape == (len(tokens),)
            count = len(tokens) if is_row is None else int(is_row.sum())
            assert count, "an item without rows says nothing"
            for name, array in processed.arrays.items():
                assert isinstance(name, str) and isinstance(array, np.ndarray)
                assert array.dtype.kind in "fiub", f"{name} has the type {array.dtype}"
            num_rows = self.num_rows(modality, processed.arrays)
            assert num_rows in (None, count), f"{count} placeholders for {num_rows} rows"

    def test_the_result_depends_on_the_item_only(self) -> None:
        """Again, in other threads, and after other items."""
        processor = self.processor()
        items = self.items()
        expected = [self.process(modality, value) for modality, value in items]
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda item: processor.process(*item, {}), items * 2))
        for one, other in zip(expected * 2, results, strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            assert one.arrays.keys() == other.arrays.keys()
            for name, array in one.arrays.items():
                np.testing.assert_array_equal(array, other.arrays[name])

    def test_the_item_is_not_changed(self) -> None:
        for modality, value in self.items():
            before = copy.deepcopy(value)
            self.process(modality, value)
            if isinstance(value, tuple):
                np.testing.assert_array_equal(before[0], value[0])
            else:
                np.testing.assert_array_equal(np.asarray(before), np.asarray(value))

    def test_rows_have_places(self) -> None:
        """Of items whose rows a client has made, if the processor takes them."""
        processor: Any = self.processor()
        place = getattr(processor, "place_rows", None)
        for modality in {modality for modality, _ in self.items()} if place else ():
            for count in self.row_counts:
                placed = place(modality, count)
                assert isinstance(placed, Processed) and not placed.arrays
                is_row = placed.is_row
                assert count == (len(placed.token_ids) if is_row is None else int(is_row.sum()))

    def test_formed_rows_have_places(self) -> None:
        """They are those of the item."""
        processor = self.processor()
        has_forms = False
        for modality, value in self.items():
            processed = self.process(modality, value)
            if (form := self.form_of(modality, processed)) is not None:
                check_form(processor, modality, processed, form)
                has_forms = True
        assert has_forms == hasattr(processor, "place_formed_rows"), "override form_of"

    def test_unknown_options_are_refused(self) -> None:
        modality, value = self.items()[0]
        with pytest.raises(RequestError, match="no_such_option"):
            self.processor().process(modality, value, {"no_such_option": 1})


class TranscriberContract(MultiModalProcessorContract):
    """Processors that are a `Transcriber` pass these, too."""

    def test_questions(self) -> None:
        """They are about one item, in every language and with every text."""
        transcriber: Any = self.processor()
        assert transcriber.rate > 0 and transcriber.seconds > 0 and transcriber.languages
        target = [*transcriber.placeholder("audio").token_ids]
        for language in (None, *transcriber.languages):
            for text in ("", "before", "word " * 10_000):
                for has_times in {False, transcriber.has_times}:
                    wish = Wish(language=language, text=text, has_times=has_times)
                    question = transcriber.question(wish)
                    assert isinstance(question, Question) and question.token_ids
                    ids = [*question.token_ids]
                    starts = range(len(ids) - len(target) + 1)
                    count = sum(ids[start : start + len(target)] == target for start in starts)
                    assert not target or count == 1, "the question has one item"

    def test_languages_can_be_detected(self) -> None:
        transcriber: Any = self.processor()
        if (detection := transcriber.detection()) is not None:
            question, codes = detection
            assert isinstance(question, Question)
            assert {*codes.values()} <= {*transcriber.languages}

    def test_segments_are_in_order(self) -> None:
        transcriber: Any = self.processor()
        if not transcriber.has_times:
            return
        random = np.random.default_rng(1)
        size = self.tokenizer().vocabulary().size
        for count in range(30):
            token_ids = random.integers(0, size, count).tolist()
            last = 0.0
            place = 0
            for segment in transcriber.segments(token_ids, 3.0):
                assert last <= segment.start <= segment.stop <= 3.0
                assert segment.token_ids and segment.first >= place
                stop = segment.first + len(segment.token_ids)
                assert token_ids[segment.first : stop] == [*segment.token_ids]
                last = segment.stop
                place = stop

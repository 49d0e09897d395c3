"""Errors as another process can read them."""

from __future__ import annotations

import pickle

import pytest

from pegboard.errors import ConfigError, PegboardError, PluginBroken, RequestError, portable


class TwoWords(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no"),
        PluginBroken("it is broken", plugin="sampler:x"),
        RequestError("no", parameter="n"),
        LookupError("no such value"),
    ],
)
def test_type_and_attributes_are_kept(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(portable(error)))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)


def test_what_cannot_be_pickled_keeps_its_name_and_text() -> None:
    assert type(portable(TwoWords("an", "error"))) is PegboardError
    assert str(portable(TwoWords("an", "error"))) == "TwoWords: an error"

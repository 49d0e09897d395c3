"""The form of an image whose rows a client has made. This module does not import torch, because
processors read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegboard.errors import RequestError

if TYPE_CHECKING:
    import numpy as np


def numbers_of(
    form: "Mapping[str, np.ndarray]", counts: Mapping[str, int], meaning: str
) -> list[int]:
    """Return the numbers of a form, those of all names after each other. counts: name → how many
    numbers it has. meaning: says what they are, for errors. Raises RequestError for other names,
    for other counts and for numbers below 0."""
    numbers = [int(number) for name in counts if name in form for number in form[name].flat]
    sizes = {name: array.size for name, array in form.items()}
    if sizes != dict(counts) or min(numbers) < 0:
        given = {name: array.tolist() for name, array in form.items()}
        raise RequestError(
            f"beside the rows of the image came {str(given or 'nothing')[:120]}; this model needs "
            f"{meaning}, and nothing else. Send a mapping with them and image_embeds"
        )
    return numbers


def refuse_form(form: "Mapping[str, np.ndarray]", modality: str) -> None:
    """Raise RequestError if something came beside the rows of an item that has no form."""
    if form:
        raise RequestError(
            f"beside the rows of type {modality} came {', '.join(form)[:80]}; this model needs "
            "only the rows. Leave the rest out"
        )


def wrong_rows(num_rows: int, expected: str) -> RequestError:
    """Return the error for rows that are not as many as their form says. expected: the form."""
    return RequestError(f"the image has {num_rows} rows; expected {expected}")

"""Rows that come with a request in place of an item. This file does not import numpy until there
are such rows, because the API process loads it at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pegboard.data.prompt_embeds import PromptEmbeds, wrong_embeds

if TYPE_CHECKING:
    import numpy as np

MAX_NUMBERS = 4096
"""The most numbers that a client may say of items beside their rows, under one name."""


class GivenItem(NamedTuple):
    """An item whose rows a client has made. form: what the client says of the item beside them,
    name → int64 [numbers]."""

    rows: PromptEmbeds
    form: "Mapping[str, np.ndarray]"


def given_item(value: Any, modality: str, path: str) -> GivenItem:
    """Return the one item of `given_items`. Raises RequestError if there are several."""
    items = given_items(value, modality, path)
    if len(items) != 1:
        raise wrong_embeds(path, f"expected the rows of one item, got those of {len(items)}")
    return items[0]


def given_items(value: Any, modality: str, path: str) -> list[GivenItem]:
    """Return items whose rows a client has made. value: the rows of one item, or vLLM's mapping of
    one or several: the rows under "image_embeds", and integers under other names. The rows are a
    tensor [items, rows, width], or a list with [rows, width] of each item, or with …_grid_thw
    beside them also a tensor [rows of all, width].
    The integers are [items, numbers], or [numbers] of one item. path: of the field, for errors.
    Raises RequestError, which names it."""
    if not isinstance(value, Mapping):
        return [GivenItem(_rows_of(value, path), {})]
    name = f"{modality}_embeds"
    if name not in value:
        names = ", ".join(map(str, value))
        raise wrong_embeds(path, f"expected a mapping with {name}, got the names {names[:80]!r}")
    form = {
        str(key): _lines_of(numbers, f"{path}.{key!s:.40}")
        for key, numbers in value.items()
        if key != name
    }
    rows = value[name]
    if isinstance(rows, list) or getattr(rows, "ndim", 0) == 3:
        parts = [_rows_of(part, path) for part in rows]
    else:
        parts = _shared_out(_rows_of(rows, path), form.get(f"{modality}_grid_thw"), path)
    for key, lines in form.items():
        if len(lines) != len(parts):
            raise wrong_embeds(
                path,
                f"{name} has the rows of {len(parts)} items, and {key[:40]} is of {len(lines)}; "
                "send a list with a tensor for each item",
            )
    return [
        GivenItem(part, {key: lines[index] for key, lines in form.items()})
        for index, part in enumerate(parts)
    ]


def _rows_of(value: Any, path: str) -> PromptEmbeds:
    return value if isinstance(value, PromptEmbeds) else PromptEmbeds.of(value, path=path)


def _lines_of(value: Any, path: str) -> "np.ndarray":
    """Return integers, int64 [items, numbers]."""
    import numpy as np

    try:
        numbers = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError):  # such as lists of different lengths
        numbers = np.empty(0, object)
    numbers = numbers[None] if numbers.ndim == 1 else numbers
    if numbers.dtype.kind not in "iu" or numbers.ndim != 2 or not 0 < numbers.size <= MAX_NUMBERS:
        raise wrong_embeds(
            path,
            f"expected whole numbers [items, numbers], at most {MAX_NUMBERS}, got {value!r:.80}",
        )
    return numbers.astype(np.int64)


def _shared_out(rows: PromptEmbeds, grids: "np.ndarray | None", path: str) -> list[PromptEmbeds]:
    """Return the rows of each item. grids: int64 [items, axes]; an item has rows in proportion to
    the cells of its grid. None = it is one item."""
    if grids is None or len(grids) == 1:
        return [rows]
    cells = [math.prod(grid) for grid in grids.tolist()]
    num_rows = rows.shape[0]
    total = sum(cells)
    if min(cells) < 1 or not num_rows or any(count * num_rows % total for count in cells):
        raise wrong_embeds(
            path,
            f"{num_rows} rows cannot be shared out to {len(cells)} grids of {str(cells)[:80]} "
            "patches; expected the rows of all items below each other",
        )
    size = len(rows.data) // num_rows
    parts = []
    first = 0
    for count in cells:
        stop = first + count * num_rows // total
        data = rows.data[first * size : stop * size]
        parts.append(msgspec.structs.replace(rows, data=data, shape=(stop - first, rows.shape[1])))
        first = stop
    return parts

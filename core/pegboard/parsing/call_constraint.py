"""A grammar that leaves text free and holds calls to their tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint


def constrained_calls(
    tools: Sequence[Mapping[str, Any]], begin: Callable[[str], str], end: str, triggers: Sequence[str]
) -> Constraint | None:
    """A structural tag: once a trigger is written, one of the calls must follow, its arguments by its tool's schema where the
    tool is `strict`, any object where it is not.

    begin: all that stands before the arguments of the function of that name, the trigger included. end: all that stands behind
    them. None when there are no tools.
    """
    structures = []
    for tool in tools:
        function = tool["function"]
        is_strict = function.get("strict") and function.get("parameters")
        schema = function["parameters"] if is_strict else {"type": "object"}
        structures.append({"begin": begin(function["name"]), "schema": schema, "end": end})
    if not structures:
        return None
    tag = {"type": "structural_tag", "structures": structures, "triggers": list(triggers)}
    return Constraint("structural_tag", json.dumps(tag, ensure_ascii=False))

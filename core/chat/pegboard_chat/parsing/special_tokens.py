"""Adapts structural tags to a vocabulary in which some of their texts are special tokens, which
plain text cannot produce. Such a text becomes {"type": "token", "token": id} in its place, also at
the beginning of a tag. `special_tokens` of the triggered tags are the tokens that free text may
contain. A trigger that contains a token is replaced by that token, whatever precedes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.structural_tag import Format, constraint, json_value, sequence, text


def with_special_tokens(given: Constraint, token_ids: Mapping[str, int]) -> Constraint:
    """Return the constraint with tokens instead of texts that are tokens. It is unchanged if it
    has no such texts. token_ids: text → id of all special tokens, except those that end an output.
    """
    if given.kind != "structural_tag" or not token_ids:
        return given
    tag = json.loads(given.text)
    form = tag["format"] if "format" in tag else _triggered(tag)
    splitting = _Splitting(token_ids)
    return (
        constraint(splitting.format(form)) if any(map(splitting.has_token, _texts(form))) else given
    )


def _triggered(tag: Mapping[str, Any]) -> Format:
    """Converts the older form of structural tags to the newer one."""
    tags = [
        {
            "type": "tag",
            "begin": item["begin"],
            "content": json_value(item.get("schema", {})),
            "end": item["end"],
        }
        for item in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _texts(form: Any) -> Iterator[str]:
    """Yield all texts that must be written literally."""
    if isinstance(form, list):
        for inner in form:
            yield from _texts(inner)
    elif isinstance(form, Mapping):
        yield from (
            form[key] for key in ("begin", "end", "value") if isinstance(form.get(key), str)
        )
        yield from form.get("triggers", ())
        yield from _texts([value for key, value in form.items() if key != "json_schema"])


class _Splitting:
    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self.token_ids = token_ids
        longest_first = sorted(token_ids, key=len, reverse=True)
        self.pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def has_token(self, value: str) -> bool:
        return self.pattern.search(value) is not None

    def parts(self, value: str) -> list[Format]:
        pieces = [piece for piece in self.pattern.split(value) if piece]
        return [
            {"type": "token", "token": self.token_ids[piece]}
            if piece in self.token_ids
            else text(piece)
            for piece in pieces
        ]

    def triggered(self, form: Format) -> Format:
        tags = [self.tag(inner, form["triggers"]) for inner in form["tags"]]
        triggers = [trigger for trigger in form["triggers"] if not self.has_token(trigger)]
        begins = {inner["begin"]["token"] for inner in tags if not isinstance(inner["begin"], str)}
        others = sorted(set(self.token_ids.values()) - begins)
        return {
            "type": "triggered_tags",
            "triggers": triggers,
            "tags": tags,
            "special_tokens": others,
        }

    def tag(self, tag: Format, triggers: Sequence[str]) -> Format:
        first, *rest = self.parts(tag["begin"])
        trigger = next(text for text in triggers if tag["begin"].startswith(text))
        while self.has_token(trigger) and first["type"] != "token":
            first, *rest = rest
        content = sequence(*rest, self.format(tag["content"]), *self.parts(tag["end"]))
        return {"type": "tag", "begin": first.get("value", first), "content": content, "end": ""}

    def format(self, form: Format) -> Format:
        """Return the format with tokens instead of texts, at all levels."""
        if form["type"] == "const_string":
            return sequence(*self.parts(form["value"]))
        if form["type"] == "triggered_tags":
            return self.triggered(form)
        if "elements" in form:
            return {**form, "elements": [self.format(inner) for inner in form["elements"]]}
        return {**form, "content": self.format(form["content"])} if "content" in form else form

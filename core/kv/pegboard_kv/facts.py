"""What an engine says about its blocks, in words, and how two engines differ. It imports no torch.

The facts are those of `KVPlan.facts`. Those of another engine come from outside, so nothing is
assumed about them: what is too long, no mapping of texts, or not printable does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MAX_BYTES = 1 << 16
"""Size of encoded facts. More is refused."""
MAX_FACTS = 64
MAX_TEXT = 120
"""Characters of a text that are shown."""
ABSENT = "nothing"
"""Stands for a fact that one side does not have."""


def encode_facts(facts: Mapping[str, str]) -> bytes:
    """Return the facts as JSON. Equal facts are equal bytes."""
    return msgspec.json.format(msgspec.json.encode(dict(facts), order="sorted"), indent=1) + b"\n"


def decode_facts(data: bytes) -> dict[str, str] | None:
    """Return the facts that another engine has encoded, or None if they are too long or not a
    mapping of texts."""
    if len(data) > MAX_BYTES:
        return None
    try:
        facts = msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return facts if len(facts) <= MAX_FACTS else None


def differences(
    ours: Mapping[str, str], theirs: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    """Return name → (our text, their text) of the facts that differ, in our order. None = that side
    does not have the fact."""
    names = dict.fromkeys((*ours, *theirs))
    return {
        name: (ours.get(name), theirs.get(name))
        for name in names
        if ours.get(name) != theirs.get(name)
    }


def describe_difference(ours: Mapping[str, str], theirs: Mapping[str, str], other: str) -> str:
    """Return in one line how this engine differs from another one. other: what to call the other
    one, for example "the folder"."""
    parts = [
        f"{_shown(name)}: this engine has {_shown(our)}, {other} has {_shown(their)}"
        for name, (our, their) in differences(ours, theirs).items()
    ]
    return "; ".join(parts) or f"this engine and {other} differ in something that has no name"


def _shown(text: str | None) -> str:
    """Return a text that is short, and that no terminal can take for a command."""
    if text is None:
        return ABSENT
    printable = "".join(letter if letter.isprintable() else "?" for letter in text[: MAX_TEXT + 1])
    return f"{printable[:MAX_TEXT]}…" if len(printable) > MAX_TEXT else printable

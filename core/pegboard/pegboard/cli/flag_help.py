"""`--help=WORD`: one group of flags, or the flags that match a word. What vLLM has and we refuse is told with its reason."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pegboard.cli.flags import FlagParser
from pegboard.cli.usage import UsageError
from pegboard.config.sources import is_vllm_name
from pegboard.config.vllm_names import ABSENT
from pegboard.plugins.names import did_you_mean


def asked_help(argv: Sequence[str]) -> str | None:
    """The word behind `--help=`; None when there is none."""
    return next((word.partition("=")[2] for word in argv if word.startswith("--help=")), None)


def print_help(parser: FlagParser, word: str) -> int:
    """Print what `word` asks for: "all", "listgroup", the name of a group, a flag or a part of one. Raises UsageError."""
    groups = {str(group.title).partition(" ")[0]: group for group in parser._action_groups if group._group_actions}
    word = word.strip("-").lower()
    if word == "all":
        parser.print_help()
    elif word == "listgroup":
        print("\n".join(f"{name:<12} {len(group._group_actions)} flags" for name, group in groups.items()))
    elif word in groups:
        _print(parser, groups[word]._group_actions)
    else:
        _search(parser, word.replace("_", "-"))
    return 0


def _search(parser: FlagParser, word: str) -> None:
    exact = [action for action in parser._actions if f"--{word}" in action.option_strings]
    found = exact or [action for action in parser._actions if any(word in name for name in action.option_strings)]
    refused = {f"--{name.replace('_', '-')}": absent for name, absent in ABSENT.items() if is_vllm_name(name)}
    reasons = {flag: absent.reason for flag, absent in refused.items() if word in flag and not exact}
    if not found and not reasons:
        raise UsageError(f"no flag matches {word!r}{did_you_mean(f'--{word}', [*parser.flags, *refused])}")
    if found:
        _print(parser, found)
    if reasons:
        print("cannot act here:" if not found else "\ncannot act here:")
        print("\n".join(f"  {flag}: {reason}" for flag, reason in reasons.items()))


def _print(parser: FlagParser, actions: Sequence[argparse.Action]) -> None:
    shown = parser._get_formatter()
    shown.add_arguments(actions)
    print(shown.format_help().rstrip())

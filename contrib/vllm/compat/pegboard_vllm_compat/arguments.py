"""FlexibleArgumentParser: argparse with vLLM's additions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from pegboard_vllm_compat.engine_args import value_of


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Flags may be written with `_` or `-`. `--config FILE.yaml` holds flags by name, and those of
    the command line come before it. `--NAME.key value` and `--NAME.list+ value` set parts of a flag
    that takes JSON, and `-O2` is `-O 2`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Translate the words and parse them as argparse does."""
        import sys

        words = list(sys.argv[1:] if args is None else args)
        plain = self._joined(self._with_config([self._spelled(word) for word in words]))
        return super().parse_known_args(plain, namespace)

    def _spelled(self, word: str) -> str:
        """Return a word whose flag is spelled as it was added."""
        if word.startswith("-O") and len(word) > 2 and word[2] not in ".=":
            return f"-O={word[2:]}"
        if not word.startswith("--"):
            return word
        flag, equals, value = word.partition("=")
        name, dot, keys = flag.partition(".")
        names = {option.replace("_", "-"): option for option in self._option_string_actions}
        return names.get(name.replace("_", "-"), name) + dot + keys + equals + value

    def _with_config(self, words: list[str]) -> list[str]:
        """Return the words with those of the file that `--config` names."""
        if "--config" in self._option_string_actions:
            return words  # the script reads it
        for place, word in enumerate(words):
            flag, equals, path = word.partition("=")
            if flag != "--config":
                continue
            length = 1 if equals else 2
            if not equals and place + 1 == len(words):
                self.error("--config expects a file")
            path = path or words[place + 1]
            rest = words[:place] + words[place + length :]
            names = {one.partition("=")[0] for one in rest if one.startswith("--")}
            return words[:place] + self._of_file(path, names) + words[place + length :]
        return words

    def _of_file(self, path: str, skip: set[str]) -> list[str]:
        """Return the flags of a YAML file, without those in `skip`."""
        import yaml

        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
        words: list[str] = []
        for key, value in values.items():
            flag = self._spelled(f"--{key}")
            if flag in skip:
                continue
            if isinstance(value, bool):
                words += [flag] if value else []
            elif isinstance(value, list):
                words += [flag, *map(str, value)]
            else:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                words.append(f"{flag}={text}")
        return words

    def _joined(self, words: list[str]) -> list[str]:
        """Return the words, in which flags with keys are one flag with JSON."""
        plain: list[str] = []
        parts: dict[str, dict[str, Any]] = {}
        rest = iter(words)
        for word in rest:
            flag, equals, value = word.partition("=")
            name, dot, keys = flag.partition(".")
            if not dot or not name.startswith("-") or name not in self._option_string_actions:
                plain.append(word)
                continue
            text = value if equals else next(rest, "")
            _put(parts.setdefault(name, {}), keys.replace("-", "_").split("."), value_of(text))
        return plain + [f"{name}={json.dumps(value)}" for name, value in parts.items()]


def _put(target: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set a value in nested mappings. A last key that ends with + appends to a list."""
    for key in keys[:-1]:
        target = target.setdefault(key, {})
    last = keys[-1]
    if last.endswith("+"):
        target.setdefault(last[:-1], []).append(value)
    else:
        target[last] = value

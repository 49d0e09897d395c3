"""`pegboard vllm-compat serve`: `pegboard serve` with vLLM's flags for plugin files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pegboard.errors import ConfigError, UsageError
from pegboard.interfaces.command import CommandSetup
from pegboard_server.serve import Serve
from pegboard_vllm_compat import finder
from pegboard_vllm_compat.bridge import Adapted, write
from pegboard_vllm_compat.entry_points import general, io_processors
from pegboard_vllm_compat.processors import adapted, adapted_loggers
from pegboard_vllm_compat.registered import registered_by
from pegboard_vllm_compat.targets import new_module

USAGE = """\
usage: pegboard vllm-compat serve [MODEL] [--tool-parser-plugin FILE.py]
       [--reasoning-parser-plugin FILE.py] [--logits-processors module:Class ...]
       [--io-processor-plugin NAME] [--shadow] [flags of pegboard serve]

Serve a model with plugin files and logits processors that were written for vLLM. All other flags
are those of pegboard serve, whose --help lists them."""
FILES = ("--tool-parser-plugin", "--reasoning-parser-plugin")


def run_serve(words: Sequence[str], setup: CommandSetup) -> int:
    """Run the server and return the exit status."""
    if "--help" in words or "-h" in words:
        print(USAGE)
        return 0
    return Serve(None, setup).run(with_plugins(words))


def with_plugins(words: Sequence[str]) -> list[str]:
    """Return the words of `pegboard serve`, in which `--plugin FILE` stands for everything of
    vLLM's form. Raises ConfigError for a file that registers no parser."""
    rest = [_spelled(word) for word in words]
    shadow = "--shadow" in rest
    if shadow:
        rest.remove("--shadow")
    finder.install(shadow=shadow)
    model = rest[0] if rest and not rest[0].startswith("-") else ""
    items: list[Adapted] = []
    for target, run in general():
        items += registered_by(target, run, model)
    for path in dict.fromkeys(path for flag in FILES for path in _taken(rest, flag)):
        parsers = registered_by(path, partial(new_module, path))
        if not parsers:
            raise ConfigError(f"{path} registers no parser")
        items += parsers
    resolvers = [item.name for item in items if item.kind == "lora_resolver"]
    if resolvers and not any(word.startswith("--lora-resolvers") for word in rest):
        rest += ["--lora-resolvers", *resolvers]
    processors = _taken(rest, "--logits-processors", several=True)
    names, of_processors = adapted(processors, elsewhere=True, model=model)
    if names:
        rest += ["--logits-processors", *names]
    items += of_processors + adapted_loggers(None, model=model)
    for name in _taken(rest, "--io-processor-plugin")[-1:]:
        is_vllms = name in io_processors()
        rest += ["--io-processor-plugin", f"vllm-{name}" if is_vllms else name]
        if is_vllms:
            items.append(Adapted("io_processor", f"vllm-{name}", name, base_model=model))
    return [*rest, "--plugin", str(write(items, shadow=shadow))] if items else rest


def _spelled(word: str) -> str:
    """Return a flag with dashes."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _taken(words: list[str], flag: str, *, several: bool = False) -> list[str]:
    """Remove a flag from the words and return its values."""
    values: list[str] = []
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        if name != flag:
            place += 1
            continue
        del words[place]
        if equals:
            values.append(value)
            continue
        if place == len(words) or words[place].startswith("-"):
            raise UsageError(f"{flag} expects a value")
        values.append(words.pop(place))
        while several and place < len(words) and not words[place].startswith("-"):
            values.append(words.pop(place))
    return values

"""`pegboard plugins show` and `pegboard plugins why` explain plugins and how they are chosen. They
run specs and probes."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pegboard.cli.main import main
from pegboard.config.schema import PluginConfig
from pegboard.config.sources import plugin_config
from pegboard.errors import ConfigError, PegboardError, PluginError, UsageError
from pegboard.installed import Entry
from pegboard.interfaces import KINDS
from pegboard.interfaces.command import CommandSetup
from pegboard.interfaces.spec import Need
from pegboard.plugins import lockfile
from pegboard.plugins.names import check_kind
from pegboard.plugins.options import schema_text
from pegboard.plugins.registry import Registry
from pegboard.plugins.selection import Decision
from pegboard_doctor.changes import described, difference, with_changes
from pegboard_doctor.choices import decide, kernels, need_of
from pegboard_doctor.trials import refuse_stuck

NO_WINNER = {
    ("keyed"): (
        "a setting or the model names the one that is used; ask with --name NAME or --model REF"
    ),
    ("chain"): (
        "those that settings name are asked in their order; ask with --name NAME or --need "
        "KEY=VALUE"
    ),
    "set": "all that are enabled run",
}
"""How a plugin is chosen → what to say when nothing is asked for."""


class Show:
    """The command `plugins show`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard plugins show",
            description="Show one plugin: its spec, probe and options.",
        )
        self._parser.add_argument(
            "plugin", metavar="KIND:NAME", help='"kind:name" or "kind:distribution:name"'
        )
        self._parser.add_argument(
            "--json", action="store_true", dest="as_json", help="machine-readable output"
        )

    def run(self, words: Sequence[str]) -> int:
        arguments = self._parser.parse(words)
        return _show(Registry.discover(plugin_config()), arguments)


class Why:
    """The command `plugins why`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        description = "Show which plugin would be chosen, and why the others would not be."
        parser = self._parser = setup.parser(prog="pegboard plugins why", description=description)
        parser.add_argument(
            "kind", nargs="?", metavar="KIND", help="the kind; with --model it is optional"
        )
        parser.add_argument(
            "--need",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a field of the kind's need; repeatable",
        )
        parser.add_argument(
            "--name", help="an explicit choice, or the key to look up in a keyed kind"
        )
        parser.add_argument(
            "--platform",
            "--as",
            metavar="DEVICE",
            help="device family to choose for; with --model or --lock it need not be here",
        )
        parser.add_argument(
            "--model", metavar="REF", help="explain the choices for serving this model"
        )
        parser.add_argument(
            "--lock",
            metavar="FILE",
            type=Path,
            help="explain the choices that `plugins lock --model` has recorded, and what differs",
        )
        parser.add_argument(
            "--json", action="store_true", dest="as_json", help="machine-readable output"
        )

    def run(self, words: Sequence[str]) -> int:
        """Return 0, or 1 if no plugin suits."""
        arguments = self._parser.parse(words)
        config = plugin_config()
        if arguments.lock is not None:
            return _why_locked(arguments, config)
        if arguments.model is not None:
            refuse_stuck(_allowed(Registry.discover(config), KINDS))
            return _why_for_model(arguments, config)
        return _why(Registry.discover(config), arguments)


def _show(registry: Registry, arguments: Namespace) -> int:
    kind, colon, name = arguments.plugin.partition(":")
    if not (colon and name):
        raise ConfigError(f"{arguments.plugin!r}: expected KIND:NAME, as in 'attention:triton'")
    entry = registry.find(kind, name)
    refuse_stuck([entry])
    spec = registry.spec(entry)
    verdict = registry.verdict(entry)
    facts: dict[str, Any] = {
        "id": entry.id,
        "qualified": entry.qualified,
        "value": entry.value,
        "group": entry.group,
        "spec": _field_values(spec),
        "probe": {"verdict": type(verdict).__name__.lower(), **_field_values(verdict)},
        "options": schema_text(entry),
    }
    if arguments.as_json:
        _print_json(facts)
        return 0
    print(entry.id)
    print(f"  {entry.value}   {entry.group}")
    for field, value in facts["spec"].items():
        if value not in (None, [], {}):
            print(f"  {field:<16}{_text(value)}")
    print(
        (
            f"  {'probe says':<16}{' '.join(_text(value) for value in facts['probe'].values())}"
        ).rstrip()
    )
    print(f"\n{facts['options']}")
    return 0


def _why(registry: Registry, arguments: Namespace) -> int:
    if arguments.kind is None:
        raise UsageError(
            "pegboard plugins why needs a KIND, or --model REF for all choices of a model"
        )
    check_kind(arguments.kind)
    kind = KINDS[arguments.kind]
    if kind.chosen in NO_WINNER and not (arguments.name or arguments.need):
        if not arguments.as_json:
            print(f"{kind.name}: {NO_WINNER[kind.chosen]}")
        return main(
            ["plugins", "list", "--kind", kind.name, *(["--json"] if arguments.as_json else [])]
        )
    need = need_of(arguments.kind, arguments.need, arguments.platform)
    refuse_stuck(_allowed(registry, [kind.name]), need)
    if kind.name == "kernel" and not arguments.name:
        return _why_kernels(registry, need, arguments.as_json)
    error = ""
    key = (
        arguments.name
        if kind.chosen == "keyed" and arguments.name and ":" not in arguments.name
        else ""
    )
    try:
        decision = (
            registry.choose(kind.name, need, keys=[key])
            if key
            else registry.choose(kind.name, need, explicit=arguments.name)
        )
    except PluginError as failure:
        error = str(failure)
        recorded = registry.decisions.get((kind.name, key))
        if recorded is None or not recorded.candidates:
            raise
        decision = recorded
    if arguments.as_json:
        _print_json({**described(decision), "error": error})
    else:
        print(with_changes(decision).table())
        if error:
            print(error.partition("\n")[0], file=sys.stderr)
    return 1 if error else 0


def _allowed(registry: Registry, kinds: Iterable[str]) -> list[Entry]:
    return [entry for kind in kinds for entry in registry.entries(kind)]


def _why_kernels(registry: Registry, need: Need, as_json: bool) -> int:
    """Show one choice per op and weight format, the choice of the recorder, and what the probes of
    the chosen kernels found."""
    decisions = kernels(registry, need)
    _print_decisions(
        decisions, as_json, "no kernels are installed: core's torch operators are used"
    )
    winners = {
        decision.winner.distribution: decision.winner
        for decision in decisions
        if decision.winner is not None
    }
    for distribution, entry in winners.items() if not as_json else ():
        facts = _field_values(registry.verdict(entry)).get("facts") or {}
        print(
            f"{distribution}: "
            f"{', '.join(f'{name} {_text(value)}' for name, value in facts.items())}"
        )
    return 0


def _why_for_model(arguments: Namespace, config: PluginConfig) -> int:
    """Print the choices for a model: those that depend on the checkpoint, the platform, the kernels
    and the model's layers. Return the exit status, which is 1 if the model cannot run or the
    requested kind is not among the choices."""
    if arguments.kind is not None:
        check_kind(arguments.kind)
    with_layers = arguments.kind in (None, "model", "attention")
    registry, trouble = decide(arguments.model, config, with_layers, arguments.platform)
    decisions = [
        decision
        for (kind, _), decision in sorted(registry.decisions.items())
        if arguments.kind in (None, kind)
    ]
    if decisions or arguments.as_json:
        _print_decisions(decisions, arguments.as_json)
    if trouble:
        print(f"this model cannot run: {trouble}", file=sys.stderr)
    elif not decisions:
        print(f"{arguments.kind}: not chosen before the engine starts", file=sys.stderr)
    return 0 if decisions and not trouble else 1


def _why_locked(arguments: Namespace, config: PluginConfig) -> int:
    """Print the choices that a lock file has recorded, perhaps on another machine. Under each that
    would not be made here, print what stops it here. Nothing is fetched because a file names it: a
    model that is not a path here must be named by the user. Return 1 if a choice would not be made,
    or if the requested kind is not among the choices."""
    locked = lockfile.read(arguments.lock)
    if locked.model is None:
        raise ConfigError(f"{arguments.lock} records no choices: write it with --model REF")
    decisions = [item for item in locked.decisions if arguments.kind in (None, item.kind)]
    here: Mapping[tuple[str, str], Decision] = {}
    trouble = ""
    try:
        if arguments.model is None and not Path(locked.model).exists():
            raise ConfigError(f"{locked.model} is not a path here; name the model with --model")
        model = arguments.model or locked.model
        registry, trouble = decide(model, config, device=arguments.platform)
        here = registry.decisions
    except PegboardError as error:
        trouble = str(error)
    rows = [(decision, "" if trouble else difference(decision, here)) for decision in decisions]
    if arguments.as_json:
        _print_json([{**described(decision), "here": text} for decision, text in rows])
    else:
        for decision, text in rows:
            print(with_changes(decision).table())
            if text:
                print(f"  here: {text}")
    if trouble:
        print(f"not compared with this machine: {trouble}", file=sys.stderr)
    elif not decisions:
        print(f"{arguments.kind}: {arguments.lock} records no such choice", file=sys.stderr)
    return 0 if decisions and not any(text for _, text in rows) else 1


def _print_decisions(decisions: Sequence[Decision], as_json: bool, nothing: str = "") -> None:
    if as_json:
        _print_json([{**described(decision), "error": ""} for decision in decisions])
    else:
        print("\n".join(with_changes(decision).table() for decision in decisions) or nothing)


def _field_values(value: Any) -> dict[str, Any]:
    """Return a dataclass as plain data for JSON. Sets become sorted lists, and unknown types become
    text."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(
        value, str_keys=True, order="deterministic", enc_hook=str
    )
    return plain


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items())
    return "{" + ", ".join(map(str, value)) + "}" if isinstance(value, list) else str(value)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))

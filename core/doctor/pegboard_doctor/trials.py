"""Tries plugins in a program of its own (`programs`): their specs, probes and `suits`, and the
findings of hooks. A plugin that hangs or exits is named, and stops nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from pegboard.config.schema import PluginConfig
from pegboard.errors import PegboardError, PluginBroken
from pegboard.installed import Entry
from pegboard.interfaces import HOOKS_GROUP
from pegboard.interfaces.spec import Broken, Need
from pegboard.plugins.discovery import Scan
from pegboard.plugins.hooks import Hooks
from pegboard.plugins.importing import import_part, import_spec, need_class, run_probe
from pegboard.plugins.registry import Registry
from pegboard_doctor import programs

LIMIT_S = 10.0
"""Seconds that each part of a plugin may take."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a plugin. broken: why its probe says that it cannot work, or why a hook failed.
    error: why it has no spec. findings: (level, subject, text) of its hook. stuck: which part of it
    hangs or exits. "" = none of these."""

    broken: str = ""
    error: str = ""
    findings: Sequence[tuple[str, str, str]] = ()
    stuck: str = ""


def tried(entries: Iterable[Entry], need: Need | None = None) -> dict[Entry, Trial]:
    """Try each plugin. need: what `suits` of specs is asked for; None = it is not asked."""
    given = json.dumps(None if need is None else asdict(need))
    answers = programs.examined("pegboard_doctor.trials", entries, given, limit_s=LIMIT_S)
    return {
        entry: Trial(stuck=fields) if isinstance(fields, str) else Trial(**fields)
        for entry, fields in answers.items()
    }


def refuse_stuck(entries: Iterable[Entry], need: Need | None = None) -> None:
    """Raise PluginBroken if plugins hang or exit, which names all of them. Afterwards they can be
    used in this process."""
    stuck = [(entry, trial.stuck) for entry, trial in tried(entries, need).items() if trial.stuck]
    if stuck:
        message = "; ".join(f"{entry.id}: {why}" for entry, why in stuck)
        raise PluginBroken(
            f"{message}; repair or uninstall it, or deny it (plugins.deny)", plugin=stuck[0][0].id
        )


def _tried(entry: Entry) -> Trial:
    try:
        if entry.group == HOOKS_GROUP:
            return _hooked(entry)
        spec = import_spec(entry)
        if spec.probe:
            programs.stage("its probe")
            verdict = run_probe(import_part(entry, spec.probe, "probe"))
            if isinstance(verdict, Broken):
                return Trial(broken=verdict.reason)
        given = json.loads(sys.argv[1])
        if spec.suits and given is not None:
            programs.stage("its suits")
            import_part(entry, spec.suits, "suits")(need_class(entry.kind)(**given))
    except PegboardError as error:
        return Trial(error=str(error))
    except Exception as error:  # noqa: BLE001  the plugin's code ran, and may raise anything
        return Trial(broken=f"{type(error).__name__}: {error}")
    return Trial()


def _hooked(entry: Entry) -> Trial:
    hooks = Hooks(
        Registry(Scan(hooks=(entry,)), PluginConfig(enable=[f"{entry.kind}:{entry.name}"]))
    )
    programs.stage("pegboard_doctor_checks")
    findings = [
        (item.level, item.subject, item.text)
        for checks in hooks.call("pegboard_doctor_checks")
        for item in checks
    ]
    return Trial(findings=findings, broken="; ".join(hooks.quarantined.values()))


if __name__ == "__main__":
    programs.answer(_tried)

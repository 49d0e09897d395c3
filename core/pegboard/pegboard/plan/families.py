"""Which model family a checkpoint belongs to, and what that family recommends: parsers, a
tokenizer, a chat template.

A family is data in a plugin (kind `model_family`). It is matched on the checkpoint's model type,
its architectures and the markers that its chat template writes. The markers are needed because one
architecture serves many families.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.resources import files

from pegboard.errors import PluginBroken, PluginError, PluginNotFound
from pegboard.installed import Entry
from pegboard.interfaces.model_family import ModelFamilyNeed, ModelFamilySpec
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.log import get_logger
from pegboard.plugins.registry import Registry
from pegboard.plugins.selection import Candidate, Decision, by_gate

log = get_logger(__name__)

TOOLS = re.compile(r"""(?<![\w.'"])tools(?![\w'"])""")
"""Finds the variable in which a chat template gets the tools. `message.tools` and
`message["tools"]` are not this variable."""

AUTO = "auto"
NONE = "none"
"""Values of the parser settings. AUTO: the parser that the family recommends. NONE: no parser."""


@dataclass(frozen=True, slots=True)
class Family:
    """The family that was chosen. name: None if no family fits, or if several fit equally. reason:
    why it was chosen, or why none was. chat_template: Jinja source of a template that supports
    tools; None if the family has none, or if the model's template supports tools."""

    name: str | None = None
    reason: str = ""
    recommends: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


def need_of(checkpoint: Checkpoint) -> ModelFamilyNeed:
    """Return the parts of a checkpoint that families are matched on."""
    model_type = checkpoint.config.get("model_type")
    directory = checkpoint.tokenizer.directory
    return ModelFamilyNeed(
        model_type=model_type if isinstance(model_type, str) else None,
        architectures=frozenset(checkpoint.architectures),
        template=checkpoint.chat_template,
        files=frozenset(path.name for path in directory.iterdir())
        if directory is not None and directory.is_dir()
        else None,
    )


Fit = tuple[int, Entry, ModelFamilySpec, str]
"""A family that fits: the number of matches, its entry, its spec, and the matches in words."""


def choose_family(registry: Registry, need: ModelFamilyNeed) -> Family:
    """Return the family with the most matches, and record it as the decision `model_family`. A
    broken plugin is left out with a warning."""
    candidates: list[Candidate] = []
    fitting: list[Fit] = []
    for entry in registry.entries("model_family"):
        try:
            spec = registry.spec(entry)
        except PluginError as error:
            registry.quarantine(entry, str(error))
            candidates.append(Candidate(entry, "compatible", str(error), broken=True))
            continue
        assert isinstance(spec, ModelFamilySpec), "discovery checks the spec's class"
        num_matches, words = matches(spec, need)
        if num_matches:
            fitting.append((num_matches, entry, spec, words))
        else:
            candidates.append(Candidate(entry, "suitable", words))
    fitting.sort(key=lambda row: (-row[0], row[1].sort_key))
    best = [row for row in fitting if row[0] == fitting[0][0]]
    winner = best[0] if len(best) == 1 else None
    for row in fitting:
        gate = "selected" if row is winner else "ranked"
        candidates.append(Candidate(row[1], gate, (f"{row[0]} matches: {row[3]}")))  # type: ignore[arg-type]
    reason = _reason(winner, best)
    registry.record(
        Decision(
            "model_family",
            winner[1] if winner else None,
            tuple(by_gate(candidates)),
            "",
            describe(need),
            reason,
        )
    )
    if winner is None:
        if best:
            log.warning("model family → none: %s", reason)
        return Family(reason=reason)
    log.debug("model family → %s  (%s)", winner[1].name, reason)
    return Family(
        winner[1].name,
        reason,
        dict(winner[2].recommends),
        _template(winner[1], winner[2], need.template),
    )


def _reason(winner: Fit | None, best: list[Fit]) -> str:
    if winner is not None:
        return f"matched {winner[3]}"
    if not best:
        return "no installed family fits"
    names = " and ".join(row[1].name for row in best)
    return (
        f"a tie: {names} have {best[0][0]} matches each, so nothing is recommended; name the "
        "parsers yourself"
    )


def matches(spec: ModelFamilySpec, need: ModelFamilyNeed) -> tuple[int, str]:
    """Return the number of matches, and the matches in words. If something that the family asks for
    does not match, return (0, reason).

    If the family names model types or architectures, one of them must fit. If it names file
    patterns, a file must fit. Every marker must occur in the template.
    """
    names: list[str] = []
    if need.model_type is not None and need.model_type in spec.model_types:
        names.append(f"model type {need.model_type}")
    if shared := sorted(spec.architectures & (need.architectures or frozenset())):
        names.append(f"architecture {shared[0]}")
    if not names and (spec.model_types or spec.architectures):
        return 0, "neither its model types nor its architectures fit"
    if spec.file_patterns:
        fitting = sorted(
            name
            for name in need.files or ()
            if any(fnmatchcase(name, pattern) for pattern in spec.file_patterns)
        )
        if not fitting:
            return 0, f"there is no file {' or '.join(spec.file_patterns)}"
        names.append(f"file {fitting[0]}")
    missing = [marker for marker in spec.template_markers if marker not in (need.template or "")]
    if missing:
        return 0, f"the chat template has no {missing[0]!r}"
    names += [f"template marker {marker!r}" for marker in spec.template_markers]
    return len(names), ", ".join(names) or "the family names nothing to match"


def describe(need: ModelFamilyNeed) -> str:
    """Return a need in words. Of the template, only the length is given."""
    template = (
        "no chat template"
        if need.template is None
        else f"a chat template of {len(need.template)} characters"
    )
    return (
        f"model_type={need.model_type!r}, architectures={sorted(need.architectures or ())}, "
        f"{template}"
    )


def _template(entry: Entry, spec: ModelFamilySpec, template: str | None) -> str | None:
    """Return the family's template, if the model has no template that supports tools. Raises
    PluginBroken if its file is missing."""
    if spec.chat_template is None or (template is not None and TOOLS.search(template)):
        return None
    package, _, name = spec.chat_template.partition(":")
    try:
        return files(package).joinpath(name).read_text("utf-8")
    except (OSError, ModuleNotFoundError, TypeError) as error:
        # TypeError: the name belongs to a module, not to a package
        message = (
            f"{entry.id}: chat_template {spec.chat_template!r} cannot be read ({error}); expected "
            "'package:file'"
        )
        raise PluginBroken(message, plugin=entry.id) from error


def choose_parser(registry: Registry, kind: str, asked: str, family: Family) -> str | None:
    """Return the qualified name of the parser of `kind`: the one that was asked for or, for "auto",
    the family's. None means no parser.

    If a parser that was asked for cannot be used, this is an error. If a recommended parser cannot
    be used, it is left out with a warning.
    """
    if asked == NONE:
        return None
    if asked != AUTO:
        return registry.choose(kind, Need(), explicit=asked).require().qualified
    name = family.recommends.get(kind)
    why = f"the model family {family.name} recommends none" if family.name else family.reason
    if name is not None:
        try:
            chosen = registry.choose(kind, Need(), explicit=name)
            return (
                registry.record(
                    replace(chosen, rank=f"recommended by the model family {family.name}")
                )
                .require()
                .qualified
            )
        except PluginError as error:
            advice = (
                str(error) if isinstance(error, PluginNotFound) else f"it cannot be used: {error}"
            )
            log.warning(
                "the model family %s recommends the %s %r, but %s", family.name, kind, name, advice
            )
            why = f"{name} is recommended, but {advice}"
    others = tuple(
        Candidate(entry, "ranked", "no family recommends it") for entry in registry.entries(kind)
    )
    registry.record(Decision(kind, None, others, rank=why))
    return None

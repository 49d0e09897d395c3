"""Errors for names that no plugin provides. They say what to install, or what was probably
meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pegboard.errors import PluginNotFound, UnknownPlugin, did_you_mean, nearest
from pegboard.interfaces import KINDS
from pegboard.plugins.defaults import catalogue, default_name, plugin_sets, provider


def check_kind(kind: str) -> None:
    """Raise UnknownPlugin if the kind does not exist."""
    if kind not in KINDS:
        raise UnknownPlugin(f"no kind of plugin is called {kind!r}{did_you_mean(kind, KINDS)}")


def not_found(
    kind: str, name: str, installed: Iterable[str], *, typed: bool = True
) -> PluginNotFound:
    """Return the error for a (kind, name) that no installed plugin provides. typed: a person wrote
    the name, so it may be misspelled. Names from a checkpoint are not."""
    error = UnknownPlugin if typed else PluginNotFound
    distribution = provider(kind, name)
    if distribution:
        return error(
            f"{kind} {name!r} is not installed; it is provided by {distribution}: pip install "
            f"{distribution}"
        )
    wildcard = provider(kind, "*")
    if wildcard and "*" not in installed:
        return error(
            f"no installed plugin provides {kind} {name!r}; {wildcard} takes any name: pip "
            f"install {wildcard}"
        )
    installed = sorted(set(installed))
    known = catalogue().get(kind, {})
    message = f"no installed plugin provides {kind} {name!r}"
    if match := nearest(name, [*installed, *known]) if typed else None:
        advice = "" if match in installed else f" (pip install {known[match]})"
        return error(f"{message}, did you mean {match!r}{advice}?")
    return error(
        f"{message}; " + ("installed: " + ", ".join(installed) if installed else to_install(kind))
    )


def to_install(kind: str) -> str:
    """Say what to install if there is no plugin of `kind` at all. The distribution with the default
    plugin comes first, and then those with the most plugins."""
    usual = provider(kind, default_name(kind) or "")
    counts = Counter(catalogue().get(kind, {}).values())
    options = sorted(counts, key=lambda each: (each != usual, -counts[each], each))
    if not options:
        return (
            f"no plugin of kind {kind!r} is installed, and none is catalogued: install a "
            "distribution that provides one"
        )
    provided = (
        f"it is provided by {options[0]}: pip install {options[0]}"
        if len(options) == 1
        else _commands(options)
    )
    return f"no plugin of kind {kind!r} is installed; {provided}"


def missing_providers(kind: str, installed: Iterable[str]) -> str:
    """Say what could be installed in addition to the `installed` names of a kind. Returns "" if
    there is nothing."""
    known = catalogue().get(kind, {})
    options = sorted(
        {distribution for name, distribution in known.items() if name not in set(installed)}
    )
    return _commands(options) if options else ""


def whole_sets() -> str:
    """Say how to install plugins of all kinds that a model needs at once."""
    return "a whole set: " + " or ".join(
        f"pip install 'pegboard[{extra}]'" for extra in plugin_sets()
    )


def _commands(distributions: list[str]) -> str:
    shown = ", ".join(f"pip install {distribution}" for distribution in distributions[:6])
    return f"what may be missing: {shown}{', …' if len(distributions) > 6 else ''}"

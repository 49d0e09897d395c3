"""Hooks (group `pegboard.hooks.v1`): few, cold, additive. They observe or add, and never pick an
implementation.

An entry point of the group names an object (or a module) with functions of the names below. Any
other name that starts with `pegboard_` is an error. Hooks are ambient: they run only when enabled
(`plugins.enable: ["hooks:name"]`). If a hook raises, Pegboard warns once and leaves it out for the
rest of the run. The other hooks continue.

    pegboard.hooks.v1:  audit = "acme_audit.hooks:AUDIT"

    class Audit:
        def pegboard_role_started(self, role): ...
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of `pegboard plugins doctor`. With a "problem" the command exits with status 1;
    with a "note" it does not. subject: the id of the plugin, or the name of what the finding is
    about."""

    level: Literal["problem", "note"]
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class Role:
    """A process that starts or stops. role: "api", "engine" or "worker". rank: of a worker, else
    0."""

    role: Literal["api", "engine", "worker"]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run. load_s: seconds from the first byte until the model is
    ready."""

    name: str
    architecture: str
    num_layers: int
    weight_bytes: int
    load_s: float


def pegboard_doctor_checks() -> Sequence[Finding]:  # type: ignore[empty-body]
    """Return the problems that the plugin finds in its environment. Called by
    `pegboard plugins doctor`."""


def pegboard_amend_config(draft: MutableMapping[str, Any]) -> None:
    """Change settings before they are frozen. `draft` holds the engine settings by field name. Each
    change is recorded and shown with the plugin's name. If the hook raises, its changes are
    undone."""


def pegboard_role_started(role: Role) -> None:
    """A process of this role is about to serve."""


def pegboard_role_stopping(role: Role) -> None:
    """A process of this role is about to end. Called once for each `pegboard_role_started`, unless
    the process crashes."""


def pegboard_model_loaded(model: LoadedModel) -> None:
    """The model is loaded, and its layers are bound."""

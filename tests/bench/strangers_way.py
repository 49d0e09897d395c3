"""The way of a stranger with a new plugin, for each kind: the commands of docs/plugins.md, from
`plugins new` to a request that a tiny model answers with it, in seconds.

    python tests/bench/strangers_way.py [KIND …]

Each kind starts in an environment that sees this one's packages. Prints a Markdown table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from pegboard_testing.authoring.scaffold import kinds

sys.path.insert(0, str(Path(__file__).parents[1] / "composition"))

from linked_environment import LinkedEnvironment

STEPS = ("write", "install", "test", "conform")
OFFLINE = ("--quiet", "--no-deps", "--no-build-isolation")


class Way:
    """One kind's way, in a folder of its own."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        packages = Path(sysconfig.get_path("purelib"))
        self.environment = LinkedEnvironment(folder / "environment", packages)

    def run(self, *words: str) -> tuple[float, str]:
        """Returns the seconds and the output of a command, which must succeed."""
        started = time.perf_counter()
        environment = {**os.environ, "PATH": f"{self.environment.bin}:{os.environ['PATH']}"}
        result = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if result.returncode:
            raise SystemExit(f"{self.kind}: {words}\n{result.stdout}{result.stderr}")
        return time.perf_counter() - started, result.stdout

    def walk(self) -> dict[str, object]:
        """Returns the seconds of each step, and what `plugins test` says of a request."""
        python = str(self.environment.bin / "python")
        pegboard = (python, "-m", "pegboard")
        seconds = {"write": self.run(*pegboard, "plugins", "new", self.kind, "mine")[0]}
        (package,) = self.folder.glob("pegboard-*")
        pip = self.environment.pip("install", *OFFLINE, package)
        seconds["install"] = self.run(*pip)[0]
        seconds["test"] = self.run(python, "-m", "pytest", "-q", str(package))[0]
        seconds["conform"], shown = self.run(*pegboard, "plugins", "test", str(package), "--json")
        (report,) = json.loads(shown)
        checks = report["checks"]
        served = next((each for each in checks if "request" in each["check"]), None)
        return {**seconds, "served": served["status"] if served else "none"}


def main(words: list[str]) -> None:
    print(f"| kind | {' | '.join(STEPS)} | sum | a request |")
    print(f"|---|{'---|' * len(STEPS)}---|---|")
    for kind in tqdm(words or kinds(), file=sys.stderr):
        with tempfile.TemporaryDirectory() as folder:
            found = Way(kind, Path(folder)).walk()
        numbers = [float(str(found[step])) for step in STEPS]
        cells = " | ".join(f"{number:.1f}" for number in (*numbers, sum(numbers)))
        print(f"| `{kind}` | {cells} | {found['served']} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Runs the tests. `make test` calls it.

    python tests/run.py [ARGUMENTS OF PYTEST]

Without arguments, all tests run in two processes at once, because most tests use one core or wait. The output of the second
process is printed when the first has ended. The exit status is that of a process that failed; a negative one is the number of the
signal that ended it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-q")
SECOND = frozenset({"plugins", "kernels"})
"""Folders whose tests take about half of the time."""


def main(words: list[str]) -> int:
    if words:
        return subprocess.run([*PYTEST, *words], cwd=ROOT, check=False).returncode
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]["testpaths"]
    first = [folder for folder in folders if folder not in SECOND]
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen([*PYTEST, *sorted(SECOND)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as other,
    ):
        status = subprocess.run([*PYTEST, *first], cwd=ROOT, check=False).returncode
        print(f"\n{', '.join(sorted(SECOND))}:", flush=True)
        other.wait()
        output.seek(0)
        sys.stdout.buffer.write(output.read())
        print(f"\nexit status {status} of {', '.join(first)}, and {other.returncode} of the others", flush=True)
    return status or other.returncode


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None

"""One real installation, with a virtual environment, pip and the wheels."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from layers import ROOT, Layers
from test_sets import GENERATE, MINIMAL


def run(*command: str | Path) -> str:
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=150
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_pip_installs_a_working_set(
    layers: Layers, wheels: dict[str, Path], checkpoint: Path, tmp_path: Path
) -> None:
    """The third-party packages come from the links of the same set, so no network is needed."""
    own, third_party = layers.of(MINIMAL.values()).path
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    names = sorted(layers.with_required(MINIMAL.values()))
    folder = next(iter(wheels.values())).parent
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "-q", "--no-index", "--no-deps", "--find-links", folder, *names)
    site = Path(
        sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    )
    (site / "third_party.pth").write_text(f"{third_party}\n")
    assert "5, 5" in run(
        python, "-I", "-c", "import json, sys\n" + GENERATE.format(model=str(checkpoint)) + CHECK
    )
    shown = run(environment / "bin" / "pegboard", "plugins", "list")
    assert "cpu_paged" in shown
    assert str(ROOT) not in run(python, "-I", "-c", "import pegboard; print(pegboard.__file__)")


CHECK = """
    print([len(output.outputs[0].token_ids) for output in outputs])
"""

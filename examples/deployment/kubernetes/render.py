"""Writes pegboard.yaml: the Helm chart with its default values, for those who do not use Helm.
Needs the package helm-python-sdk."""

from __future__ import annotations

from pathlib import Path

import helm_python

FOLDER = Path(__file__).parent
CHART = FOLDER.parent / "helm/pegboard"
HEAD = "# The Helm chart with its default values, written by render.py.\n"


def rendered() -> str:
    """Return the text of pegboard.yaml."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render({}, name="pegboard", namespace="default")
    texts = [files[name].strip() for name in sorted(files)]
    return HEAD + "".join(f"---\n{text}\n" for text in texts if text)


if __name__ == "__main__":
    (FOLDER / "pegboard.yaml").write_text(rendered(), "utf-8")

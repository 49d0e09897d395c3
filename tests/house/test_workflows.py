"""The workflows of the repository's host run only what is here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from members import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps(path: Path) -> list[dict[str, Any]]:
    """Returns the steps of all jobs of a workflow."""
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_exists(path: Path) -> None:
    """Commands are valid shell. Targets of make and files of the repository exist, and actions have
    a version."""
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), step
            continue
        command = step["run"]
        subprocess.run(["bash", "-n", "-c", command], check=True)
        for target in re.findall(r"\bmake (\w+)", command):
            subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)
        for file in re.findall(r"\bbash (\S+)", command):
            assert (ROOT / file).is_file(), f"{path.name} runs {file}"


def test_jobs_that_follow_others_name_jobs() -> None:
    for path in WORKFLOWS:
        jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
        assert {job["needs"] for job in jobs.values() if "needs" in job} <= set(jobs)
        assert all("timeout-minutes" in job for job in jobs.values() if len(job["steps"]) > 4)

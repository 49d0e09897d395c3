"""The driver of `measure.py`: it runs the parts in processes of their own, keeps their results, and
judges the goals."""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from measure_stages import BY_NAME, STAGES, Goal, Results, Stage, is_done, lines

CHILD = (sys.executable, str(Path(__file__).with_name("measure_child.py")))
START_S = 120.0
"""The longest start of a process."""
TAIL = 600
"""Characters of a broken process's last messages that are kept."""


class Broken(Exception):
    """A process has ended or was stopped. Has what it said."""


class Child:
    """A process that runs parts. command: what starts it. given: what it reads first. machine: what
    it runs on. tail: the end of what it wrote to its standard error, once it has ended."""

    def __init__(self, command: Sequence[str], given: dict[str, Any]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 – as long as the process
        self.process = subprocess.Popen(
            [*command, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        self.answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.tail = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.notes: dict[str, Any] = {}
        self.machine: dict[str, Any] = self._wait("machine", START_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def _wait(self, kind: str, limit_s: float) -> Any:
        end = time.perf_counter() + limit_s
        while True:
            try:
                line = self.answers.get(timeout=max(0.0, end - time.perf_counter()))
            except queue.Empty:
                self.close(kill=True)
                raise Broken(f"stopped after {limit_s:.0f} s. {self.tail}") from None
            if line is None:
                self.close()
                status = self.process.returncode
                raise Broken(f"its process ended with status {status}. {self.tail}")
            answer = json.loads(line)
            if kind in answer:
                return answer[kind]
            self.notes = answer["note"]

    def run(self, stage: Stage, results: Results, limit_s: float) -> dict[str, Any]:
        """Run a part. Returns its result, or why it failed with what it had noted until then."""
        self.notes = {}
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"stage": stage.name, "results": results}) + "\n")
            self.process.stdin.flush()
            result: dict[str, Any] = self._wait("result", limit_s)
        except (Broken, OSError) as failure:
            return {**self.notes, "right": False, "failed": str(failure)}
        return result

    def close(self, kill: bool = False) -> None:
        """End the process and what it started. kill: without waiting for it."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with suppress(OSError):  # it has ended
                self.process.stdin.close()
        try:
            self.process.wait(0.0 if kill else 20.0)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.reader.join(5.0)
        if self.process.stdout is not None and not self.reader.is_alive():
            self.process.stdout.close()
        if not self.errors.closed:
            self.errors.seek(0)
            self.tail = self.errors.read().decode(errors="replace")[-TAIL:].strip()
            self.errors.close()


class Measuring:
    """One run of the parts that are not done. options: of the command line. results: of the runs
    before; gets those of this one."""

    def __init__(
        self, options: argparse.Namespace, results: dict[str, Any], command: Sequence[str] = CHILD
    ) -> None:
        self.options = options
        self.results = results
        self.command = command
        self.child: Child | None = None
        self.group = ""
        self.end = time.perf_counter() + 60 * options.minutes

    def run(self, stages: Sequence[Stage]) -> None:
        """Run those of these parts for which there is time. Without the engine of a group, the
        others of it are left."""
        without_engine = ""
        late = []
        try:
            for stage in stages:
                if stage.group == without_engine:
                    continue
                left = self.end - time.perf_counter()
                if left < stage.expected_s:
                    late.append(stage.name)
                    result = None
                else:
                    print(f"{stage.name}, about {stage.expected_s:g} s: ", end="", flush=True)
                    result = self._run(stage, min(stage.limit_s, left + 30))
                    self._keep(stage, result)
                if stage.name.endswith("_start") and (result is None or "failed" in result):
                    without_engine = stage.group
        finally:
            self._close()
        if late:
            print(f"no time for {', '.join(late)}: run it again to continue")

    def _keep(self, stage: Stage, result: dict[str, Any]) -> None:
        self.results[stage.name] = result
        self._judge(stage)
        self.save()
        print(json.dumps(result), flush=True)

    def _run(self, stage: Stage, limit_s: float) -> dict[str, Any]:
        group = "all" if self.options.tiny else stage.group
        if self.child is None or self.group != group:
            self._close()
            try:
                self._start(group)
            except Broken as failure:
                return {"right": False, "failed": f"no process for it: {failure}"}
        assert self.child is not None
        known = {name: self.results[name] for name in BY_NAME if name in self.results}
        result = self.child.run(stage, known, limit_s)
        if self.child.process.poll() is not None or (
            "failed" in result and f"{group}_start" in BY_NAME
        ):
            self._close()  # an engine that failed may still hold memory
        return result

    def _start(self, group: str) -> None:
        given = {"device": self.options.device, "tiny": self.options.tiny}
        self.child = None
        self.child = Child(self.command, {**given, "interpret": self.options.interpret})
        self.group = group
        before = self.results.get("machine", {}).get("device")
        machine = {**self.child.machine, "interpreted": self.options.interpret}
        if before not in (None, machine["device"]):
            raise SystemExit(
                f"{self.options.out} is about {before}, and this is {machine['device']}: "
                "name another file with --out"
            )
        self.results["machine"] = {**machine, "tiny": self.options.tiny}

    def _close(self) -> None:
        if self.child is not None:
            self.child.close()
            self.child = None

    def _judge(self, stage: Stage) -> None:
        """Add the goal of a part, and whether it was reached, to its result."""
        if stage.goal is not None and stage.name in self.results:
            found = {
                "goal": stage.goal.words(),
                "state": stage.goal.judge(stage.name, self.results),
            }
            self.results[stage.name] |= found

    def save(self) -> None:
        """Write the results. A run that is cut off leaves the file before, or all of the new
        one."""
        new = self.options.out.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1) + "\n", "utf-8")
        new.replace(self.options.out)

    def sum_up(self) -> bool:
        """Print the goals, what is wrong, and what was not run with the command that runs it, and
        add this to the results. Returns whether everything has run and is right."""
        goals = {}
        for stage in STAGES:
            self._judge(stage)
            if stage.goal is not None:
                goals[stage.name] = self._goal_line(stage.name, stage.goal)
        missing = [stage.name for stage in STAGES if stage.name not in self.results]
        wrong = [
            stage.name
            for stage in STAGES
            if stage.name in self.results and not is_done(self.results[stage.name])
        ]
        summary: dict[str, Any] = {"goals": goals}
        for name, line in goals.items():
            print(f"{name}: {line}")
        for kind, names in (("wrong or failed", wrong), ("not run", missing)):
            summary[kind] = names
            if names:
                summary[f"{kind}: command"] = self._command(names)
                print(f"{kind}: {', '.join(names)}\n  {self._command(names)}")
        if not wrong and not missing:
            print("all parts are right")
        self.results["summary"] = summary
        self.save()
        return not wrong and not missing

    def _goal_line(self, name: str, goal: Goal) -> str:
        """Return whether a goal was reached, the number, and the rate, in words."""
        result = self.results.get(name)
        if result is None:
            return f"not run (goal: {goal.words()})"
        line = f"{goal.judge(name, self.results)}: {goal.number_of(result)} (goal: {goal.words()})"
        if "rate" not in result:
            return line
        unit = self.results.get(result["roof"], {}).get("unit", "")
        return f"{line}; {result['rate']:.4g} {unit}, compared with {result['roof']}"

    def _command(self, names: Sequence[str]) -> str:
        """Return the command that runs these parts."""
        options = self.options
        words = ["python", "tests/gpu/measure.py", "--out", str(options.out)]
        words += ["--device", options.device] if options.device != "cuda" else []
        words += ["--interpret"] if options.interpret else []
        words += ["--tiny"] if options.tiny else []
        return shlex.join([*words, "--only", *names])


def chosen_stages(options: argparse.Namespace, results: dict[str, Any]) -> list[Stage]:
    """Return the parts to run: those that were asked for and are not done, and the roofs."""
    return [
        stage
        for stage in STAGES
        if stage.name in options.again
        or stage.name.endswith("_roof")
        or (
            (not options.only or stage.name in options.only)
            and not is_done(results.get(stage.name))
        )
    ]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check and measure Pegboard on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--interpret", action="store_true", help="use Triton's interpreter")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this script")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--out", type=Path, default=Path("measure.json"))
    names: dict[str, Any] = {
        "nargs": "+",
        "default": [],
        "metavar": "PART",
        "choices": list(BY_NAME),
    }
    parser.add_argument("--only", help="run no other parts", **names)
    parser.add_argument("--again", help="run these parts, even if they are done", **names)
    parser.add_argument("--list", action="store_true", help="show the parts, and run none")
    return parser


def main() -> int:
    """Return 0 if every part has run and is right."""
    parser = make_parser()
    options = parser.parse_args()
    if options.list:
        print("\n".join(lines(STAGES)))
        return 0
    if options.device == "cuda" and not options.interpret:
        import torch

        if not torch.cuda.is_available():
            parser.error(
                "torch finds no GPU; --device cpu --interpret --tiny tests the script without one"
            )
    results = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    stages = chosen_stages(options, results)
    expected = sum(stage.expected_s for stage in stages)
    print(
        f"{len(stages)} parts to run, about {expected / 60:.1f} minutes on a large GPU", flush=True
    )
    measuring = Measuring(options, results)
    measuring.run(stages)
    return 0 if measuring.sum_up() else 1

"""One request on a tiny model, answered with a plugin: python -m
pegboard_testing.authoring.one_request KIND NAME OPTIONS.

OPTIONS is a JSON object with the plugin's options. The model is a Llama with two layers and random
weights. It needs no files except a config, so only kinds that work with any model are served. The
program runs in an interpreter of its own, so that a plugin that hangs or crashes cannot stop
`pegboard plugins test`. It prints a line of JSON: {"status": "passed", "failed" or "none",
"reason": "..."}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pegboard.errors import ModelError, PegboardError, PluginNotFound, PluginUnsuitable
from pegboard_testing.tiny_engine import tokens, vectors

Status = Literal["passed", "failed", "none"]

SETTINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "attention": lambda name: {"attention_backend": name},
    "draft": lambda name: {"speculative_config": {"method": name, "num_speculative_tokens": 3}},
    "executor": lambda name: {"distributed_executor_backend": name},
    "kv_connector": lambda name: {"kv_connectors": [name]},
    "logits_processor": lambda name: {"logits_processors": [name]},
    "metrics": lambda name: {"plugins_enable": [f"metrics:{name}"]},
    "model": lambda name: {"hf_overrides": {"architectures": [name]}},
    "platform": lambda name: {"device": name},
    "pooler": lambda name: {"pooler": name},
    "quantization": lambda name: {"hf_overrides": {"quantization_config": {"quant_method": name}}},
    "sampler": lambda name: {"sampler": name},
    "scheduling_policy": lambda name: {"scheduling_policy": name},
}
"""Kind → the settings with which the tiny model uses the plugin."""
SAME_TOKENS = frozenset({"draft", "executor", "kv_connector", "metrics", "scheduling_policy"})
"""Kinds whose plugins never change a token of a greedy request."""
TIMEOUT_S = 120


def serve_one(kind: str, name: str, options: dict[str, Any]) -> tuple[Status, str]:
    """Run the program. Return the status and the reason of its last line. kind: a key of SETTINGS.
    options: the plugin's."""
    words = [sys.executable, "-m", __name__, kind, name, json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        ended = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return "failed", f"the request was not answered within {TIMEOUT_S} s"
    # the plugin may print lines too
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"status":')]
    if ended.returncode or not lines:
        return "failed", f"the program ended with status {ended.returncode}\n{ended.stderr[-2000:]}"
    answer = json.loads(lines[-1])
    return answer["status"], answer["reason"]


def judge(kind: str, name: str, options: dict[str, Any]) -> tuple[Status, str]:
    """Serve the prompts without the plugin and with it. Return the status and its reason."""
    answers: Callable[..., Sequence[Sequence[object]]] = vectors if kind == "pooler" else tokens
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        try:
            plain = answers(folder)
        except PegboardError as error:
            return "none", f"the tiny model does not run here: {error}"
        settings = SETTINGS[kind](name)
        if options:
            settings["plugin_options"] = {f"{kind}.{name}": options}
        try:
            numbers = answers(folder, **settings)
        except (ModelError, PluginUnsuitable, PluginNotFound) as error:
            return "none", f"the plugin does not suit the tiny model or this machine: {error}"
        except Exception as error:  # noqa: BLE001  the plugin's code ran, and may raise anything
            return "failed", f"{type(error).__name__}: {error}"
    if not all(numbers) or (kind in SAME_TOKENS and numbers != plain):
        return "failed", f"expected the tokens without the plugin, {plain}, found {numbers}"
    what = "numbers" if kind == "pooler" else "tokens"
    return "passed", f"{sum(map(len, numbers))} {what} of {len(numbers)} requests on a tiny model"


def main(words: Sequence[str]) -> None:
    kind, name, options = words
    status, reason = judge(kind, name, json.loads(options))
    print(json.dumps({"status": status, "reason": reason}))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Every kind can be removed: the rest works, or it says which kind is missing and what to
install."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from layers import ROOT, Installation, Layers

from pegboard.plan.engine_plan import REQUIRED
from pegboard.plugins.defaults import catalogue, plugin_sets

MINIMAL = {
    "platform": "pegboard-platform-cpu",
    "executor": "pegboard-executor-local",
    "attention": "pegboard-attention-cpu",
    "model": "pegboard-model-llama",
    "quantization": "pegboard-quantization-integer",
    "weight_loader": "pegboard-weight-loader-safetensors",
    "tokenizer": "pegboard-tokenizer-hf",
    "model_source": "pegboard-model-source-local",
    "sampler": "pegboard-sampler-torch",
    "scheduling_policy": "pegboard-scheduling-policy-queue",
}
"""One distribution for each kind that generating needs."""

GENERATE = """
import json
from pegboard import LLM, SamplingParams
from pegboard.errors import PegboardError
try:
    llm = LLM({model!r}, kv_cache_memory_bytes=1 << 20, num_threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    outputs = llm.generate(["Hello", "a longer prompt"], params, use_tqdm=False)
except PegboardError as error:
    print(json.dumps({{"error": str(error), "class": type(error).__name__}}))
else:
    print(json.dumps({{"tokens": [list(output.outputs[0].token_ids) for output in outputs]}}))
"""


def generate(installation: Installation, model: object) -> dict[str, object]:
    """Returns the tokens that LLM generates for the model in this installation, or its error."""
    return dict(json.loads(installation.output(GENERATE.format(model=str(model))).splitlines()[-1]))


# --- core alone -----------------------------------------------------------------------------------


def test_core_alone_imports_and_explains_itself(layers: Layers) -> None:
    """Without any plugin, without a command plugin, and without torch."""
    core = layers.of([])
    assert [
        path.name for path in core.path[0].iterdir() if not path.name.endswith(".dist-info")
    ] == ["pegboard"]
    assert core.output("import pegboard; print(pegboard.__version__)")
    assert not (core.path[1] / "torch").exists()
    shown = core.pegboard("--help")
    assert shown.returncode == 0 and "plugins" in shown.stdout, shown.stderr
    listed = core.pegboard("plugins", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout) == [], "no plugin is built into core"


def test_core_alone_says_what_to_install(layers: Layers, checkpoint: Path) -> None:
    core = layers.of([])
    for model in (str(checkpoint), "org/name", "pypi:something"):
        answer = generate(core, model)
        assert answer["class"] == "PluginNotFound", answer
        assert "model_source" in str(
            answer["error"]
        ) and "pip install pegboard-model-source-" in str(answer["error"]), answer
    told = str(generate(core, checkpoint)["error"])
    assert all(f"pip install {name}" in told for name in MINIMAL.values()), (
        "one message names everything that is missing"
    )
    assert "pip install 'pegboard[cpu]'" in told
    answer = generate(layers.of(MINIMAL.values()), "org/name")
    assert "org/name" in str(answer["error"]) and "pip install pegboard-model-source-hub" in str(
        answer["error"]
    ), answer
    served = core.pegboard("serve")
    assert served.returncode in (1, 2)
    assert "pegboard: error:" in served.stderr and "pip install pegboard-server" in served.stderr
    assert "Traceback" not in served.stderr


@pytest.mark.slow
def test_core_passes_its_own_tests_alone(layers: Layers) -> None:
    """The scheduler, the KV cache and the plugin system, on the fakes of pegboard-testing, without
    any plugin."""
    core = layers.of(["pegboard-testing"])
    assert not any(path.name.startswith("pegboard_server") for path in core.path[0].iterdir())
    files = ["test_scheduler.py", "test_kv_cache.py", "test_block_pool.py", "test_engine.py"]
    paths = [str(ROOT / "core/pegboard/tests" / name) for name in files]
    paths += [
        str(path)
        for path in sorted((ROOT / "core/pegboard/tests").glob("test_plugins_*.py"))
        if "catalogue" not in path.name
    ]
    options = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-m",
        "not slow",
    ]
    result = core.run(f"import pytest; sys.exit(pytest.main({[*options, *paths]!r}))", ROOT)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


# --- the minimal set, whole and in part -----------------------------------------------------------


def test_the_minimal_set_generates(layers: Layers, checkpoint: Path) -> None:
    answer = generate(layers.of(MINIMAL.values()), checkpoint)
    assert "error" not in answer, answer
    assert [len(tokens) for tokens in answer["tokens"]] == [5, 5]  # type: ignore[attr-defined]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MINIMAL)
def test_what_is_taken_away_is_named(layers: Layers, checkpoint: Path, kind: str) -> None:
    """The minimal set without one distribution gives a PluginError with the kind and the
    distribution to install. It never gives another error, and a missing plugin is never replaced
    silently."""
    left = [name for other, name in MINIMAL.items() if other != kind]
    answer = generate(layers.of(left), checkpoint)
    assert "error" in answer, f"without {kind} it still generates: {answer}"
    message = str(answer["error"])
    assert str(answer["class"]).startswith("Plugin"), answer
    assert kind in message and f"pip install {MINIMAL[kind]}" in message, message


def test_a_server_without_routes_does_not_start(layers: Layers, checkpoint: Path) -> None:
    """The kinds that only serving needs are also named."""
    served = layers.of([*MINIMAL.values(), "pegboard-server"]).pegboard(
        "serve", str(checkpoint), "--port", "0", "--kv-cache-memory-bytes", "1048576"
    )
    assert served.returncode == 1 and "Traceback" not in served.stderr
    assert "api" in served.stderr and "pip install pegboard-api-openai" in served.stderr, (
        served.stderr
    )


def test_the_set_of_the_readme_is_whole(layers: Layers, checkpoint: Path) -> None:
    """The set of distributions that newcomers are told to install answers requests, and its own
    checks find no problem."""
    command = (
        (ROOT / "README.md")
        .read_text("utf-8")
        .partition("    pip install pegboard \\\n")[2]
        .partition("\n\n")[0]
    )
    told = layers.of([*command.replace("\\", " ").split(), "pegboard-doctor"])
    assert "tokens" in generate(told, checkpoint)
    checked = told.pegboard("plugins", "doctor")
    assert checked.returncode == 0 and " 0 problems" in checked.stdout, checked.stdout


def test_the_folders_of_the_readme_are_the_same_set_and_whole() -> None:
    """Together they need no package of this repository that is not among them, because no index has
    it."""
    text = (ROOT / "README.md").read_text("utf-8")
    folders = (
        text.partition("    pip install ./core/pegboard")[2]
        .partition("\n\n")[0]
        .replace("\\", " ")
        .split()
    )
    projects = [
        tomllib.loads((ROOT / name / "pyproject.toml").read_text("utf-8"))["project"]
        for name in ["core/pegboard", *folders]
    ]
    named = {project["name"] for project in projects}
    needed = {
        re.split(r"[^\w-]", need)[0]
        for project in projects
        for need in project.get("dependencies", ())
    }
    assert {need for need in needed if need.startswith("pegboard")} <= named
    command = text.partition("    pip install pegboard \\\n")[2].partition("\n\n")[0]
    assert set(command.replace("\\", " ").split()) <= named


# --- the extras of pegboard -----------------------------------------------------------------------


def extra(layers: Layers, name: str) -> set[str]:
    """Returns the distributions that an extra of pegboard brings."""
    return {
        one.name
        for one in layers.requirements("pegboard")
        if one.name in layers.wheels
        and one.marker is not None
        and one.marker.evaluate({"extra": name})
    }


def test_the_extra_all_lists_every_plugin(layers: Layers) -> None:
    """pegboard-testing, which has a command, is for those who write plugins."""
    assert extra(layers, "all") == layers.with_plugins() - {"pegboard-testing"} | {
        "pegboard-server"
    }


def test_every_set_is_an_extra_that_fills_every_kind_a_model_needs(layers: Layers) -> None:
    catalogued = catalogue()
    for name in plugin_sets():
        brought = extra(layers, name)
        assert brought <= layers.with_plugins() | {"pegboard-server"}
        for kind in REQUIRED:
            assert brought & set(catalogued[kind].values()), f"pegboard[{name}] brings no {kind}"


def test_the_extra_for_a_cpu_generates_and_checks(layers: Layers, checkpoint: Path) -> None:
    installed = layers.of(extra(layers, "cpu"))
    assert "tokens" in generate(installed, checkpoint)
    checked = installed.pegboard("check", str(checkpoint), "--json")
    facts = json.loads(checked.stdout)
    assert (checked.returncode, facts["runs"]) == (0, "yes"), checked.stdout + checked.stderr
    assert "pegboard-kernel-cpu" in facts["plugins"] and facts["context"] == "64 tokens"
    missing = layers.of(["pegboard-doctor"]).pegboard("check", str(checkpoint))
    assert missing.returncode == 1 and "runs      no" in missing.stdout
    assert all(f"pip install {name}" in missing.stdout for name in MINIMAL.values()), missing.stdout


# --- everything -----------------------------------------------------------------------------------


def test_everything_together_gives_the_same_tokens(layers: Layers, checkpoint: Path) -> None:
    """More plugins do not change a model's output."""
    everything = layers.of(layers.wheels)
    assert generate(everything, checkpoint) == generate(layers.of(MINIMAL.values()), checkpoint)
    listed = everything.pegboard("plugins", "list", "--json")
    assert {row["distribution"] for row in json.loads(listed.stdout)} == layers.with_plugins()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["weight_loader", "tokenizer", "quantization"])
def test_another_plugin_of_the_kind_is_no_excuse(
    layers: Layers, checkpoint: Path, kind: str
) -> None:
    """Everything is installed except the plugin that fits. Other plugins of its kind remain, and
    the error still says what to install."""
    message = str(
        generate(layers.of(set(layers.wheels) - {MINIMAL[kind]}), checkpoint).get("error")
    )
    assert (
        kind.replace("_", " ") in message.replace("_", " ")
        and f"pip install {MINIMAL[kind]}" in message
    ), message

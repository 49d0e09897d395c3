"""From settings to a plan, with toy plugins."""

from __future__ import annotations

import io
import json
import pickle
import sys
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pegboard.cli.main import command_setup
from pegboard.config.sources import engine_settings
from pegboard.errors import ConfigError, ModelError, PegboardError, PluginNotFound
from pegboard.plan.engine_plan import make_tokenizer, max_model_len, resolve
from pegboard.plugins import discovery
from pegboard.plugins.registry import Registry
from pegboard_doctor.check import Check
from pegboard_doctor.explain import Why

PLUGINS = """
import json
from pathlib import Path
from pegboard.errors import ModelError
from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.model_source import LocalFiles, ModelSourceSpec
from pegboard.interfaces.platform import PlatformSpec
from pegboard.interfaces.quantization import QuantizationSpec
from pegboard.interfaces.tokenizer import TokenizerSpec
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload, WeightLoaderSpec

DISK = ModelSourceSpec(api="1.0", implementation="acme_plugins:Disk", flags=frozenset({"directory"}))
TOY = WeightLoaderSpec(api="1.0", implementation="acme_plugins:Loader", file_patterns=("*.toy",), magic=b"TOY!")
OTHER = WeightLoaderSpec(api="1.0", implementation="acme_plugins:Loader", file_patterns=("*.other",))
MODEL = ModelSpec(api="1.0", implementation="acme_plugins:nothing")
NONE = QuantizationSpec(api="1.0", implementation="acme_plugins:nothing")
PLATFORM = PlatformSpec(api="1.0", implementation="acme_plugins:nothing")
BYTES = TokenizerSpec(api="1.0", implementation="acme_plugins:Bytes", supports={"payload": {"bytes", "hf"}})


class Disk:
    def __init__(self, options, setup):
        self.setup = setup

    def fetch(self, reference, wanted, progress):
        if self.setup.offline:
            raise ModelError("not in the cache, and nothing is downloaded")
        progress("weights", 1, 2)
        return LocalFiles(Path(reference.name))


class Loader:
    def __init__(self, options, setup):
        pass

    def describe(self, files):
        config = json.loads((files.root / "config.json").read_text())
        return Checkpoint(
            format="toy", path=files.root, config=config, architectures=tuple(config["architectures"]), tensors={},
            tokenizer=TokenizerPayload("bytes", files.root), quantization=config.get("quantization_config"),
            generation_config=config.get("generation", {}),
        )

    def tensors(self, checkpoint, wanted):
        return iter(())


class Bytes:
    def __init__(self, options, setup):
        self.setup = setup
        self.render = self.encode = self.decode = self.stream = self.vocabulary = lambda *given, **more: None
"""  # noqa: E501

CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "generation": {
        "temperature": 0.6,
        "top_k": 5,
        "eos_token_id": [2, 7],
        "max_new_tokens": 9,
        "do_sample": True,
    },
}

ROPE = (
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "rope_theta",
    "low_freq_factor",
    "long_factor",
)
NESTED = ("rope_scaling", "rope_parameters")


@pytest.fixture
def model(tmp_path, monkeypatch, fake_distributions):
    """Write a toy model with the given config. Only its plugins are installed."""
    points = {
        "model_source": {"disk": "acme_plugins:DISK"},
        "weight_loader": {"toy": "acme_plugins:TOY", "other": "acme_plugins:OTHER"},
        "model": {"ToyForCausalLM": "acme_plugins:MODEL"},
        "quantization": {"none": "acme_plugins:NONE"},
        "tokenizer": {"bytes": "acme_plugins:BYTES"},
        **{
            kind: {"toy": "acme_plugins:NEVER_CHOSEN"}
            for kind in ("executor", "attention", "sampler", "scheduling_policy")
        },
        "platform": {"toy": "acme_plugins:PLATFORM"},
    }
    fake_distributions.add("acme-plugins", points, {"acme_plugins": PLUGINS})
    scan = fake_distributions.scan()
    monkeypatch.setattr(discovery, "scan", lambda: scan)

    def write(*, weights: str = "model.toy", data: bytes = b"TOY!rest", **changes):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        (folder / weights).write_bytes(data)
        return str(folder)

    return write


def test_a_plan_from_a_folder(model):
    path = model()
    plan, registry = resolve(engine_settings(path, {}))
    assert (plan.max_model_len, plan.vocab_size, plan.eos_token_ids) == (128, 300, (2, 7))
    assert plan.default_params == {"temperature": 0.6, "top_k": 5, "max_tokens": 9}
    assert (plan.model_names, plan.checkpoint.architectures) == ((path,), ("ToyForCausalLM",))
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    child = Registry.from_lock(again.lock)
    assert child.lock().decisions == ()
    made = {
        "model_source",
        "weight_loader",
        "model",
        "quantization",
        "model_family",
        "tool_parser",
        "reasoning_parser",
    }
    assert {kind for kind, _ in child._chooser._locked} == made
    assert {kind for kind, _ in registry.decisions} == made


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_download_shows_a_bar_on_a_terminal(model, monkeypatch, is_terminal):
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    resolve(engine_settings(model(), {}))
    assert ("weights:  50%" in shown.getvalue()) is is_terminal


def test_settings_change_the_plan(model):
    settings = {
        "served_model_name": ["a", "b"],
        "max_model_len": 64,
        "generation_config": "vllm",
        "override_generation_config": {"top_p": 0.5, "eos_token_id": 9},
        "hf_overrides": {"vocab_size": 400},
    }
    plan, _ = resolve(engine_settings(model(), settings))
    assert plan.model_names == ("a", "b")
    assert (plan.max_model_len, plan.vocab_size) == (64, 400)
    assert plan.default_params == {"top_p": 0.5} and plan.eos_token_ids == (2, 9)


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 300)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(
        ["yarn", "linear", "dynamic", "llama3", "longrope", "ToyForCausalLM", "64", "nan"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ROPE), inner, max_size=3)
    ),
    max_leaves=5,
)
OVERRIDES = st.dictionaries(
    st.sampled_from([*CONFIG, *ROPE, *NESTED, "model_type", "n_positions", "text_config"]),
    ODD,
    max_size=4,
)


@examples(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    overrides=OVERRIDES
    | st.dictionaries(
        st.sampled_from(NESTED), st.dictionaries(st.sampled_from(ROPE), ODD, max_size=4)
    ),
    has_parameters=st.booleans(),
)
def test_odd_overrides_of_the_config_are_named(model, overrides, has_parameters):
    """The plan can be used, or the error says which override, or which value of the config, is
    wrong."""
    path = model(rope_parameters={"rope_theta": 5e5}) if has_parameters else model(rope_theta=5e5)
    try:
        plan, _ = resolve(engine_settings(path, {"hf_overrides": overrides}))
    except PegboardError:
        return
    assert (
        plan.max_model_len >= 1
        and plan.vocab_size >= 1
        and all(0 <= token < plan.vocab_size for token in plan.eos_token_ids)
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"rope_theta": [1]}, "rope_theta=\\[1\\], expected 0 or a number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": {"a": 1}}},
            "factor={'a': 1}, expected 0 or a number",
        ),
        ({"rope_scaling": 5}, "rope_scaling 5, expected an object"),
        ({"max_position_embeddings": "many"}, "hf_overrides=.*ValueError"),
        ({"max_position_embeddings": -3}, "maximum length of -3 tokens"),
        (
            {"architectures": "ToyForCausalLM"},
            "architectures is 'ToyForCausalLM', expected a list of names",
        ),
    ],
)
def test_what_is_wrong_with_an_override(model, overrides, told):
    with pytest.raises((ConfigError, ModelError), match=told):
        resolve(engine_settings(model(), {"hf_overrides": overrides}))


def test_generation_config_of_another_folder(model, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"min_p": 0.1}')
    plan, _ = resolve(engine_settings(model(), {"generation_config": str(tmp_path)}))
    assert plan.default_params == {"min_p": 0.1}
    with pytest.raises(ConfigError, match="expected auto, vllm or a directory"):
        resolve(engine_settings(model(), {"generation_config": str(tmp_path / "missing")}))


def test_the_tokenizer_and_its_template(model, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ hello }}")
    for value, source in [
        (str(template), "{{ hello }}"),
        ("{% inline %}", "{% inline %}"),
        (None, None),
    ]:
        plan, registry = resolve(engine_settings(model(), {"chat_template": value}))
        assert make_tokenizer(registry, plan).setup.chat_template == source
    plan, registry = resolve(engine_settings(model(), {"chat_template": "missing.jinja"}))
    with pytest.raises(ConfigError, match="missing.jinja"):
        make_tokenizer(registry, plan)
    other = tmp_path / "other"
    other.mkdir()
    plan, _ = resolve(engine_settings(model(), {"tokenizer": str(other)}))
    assert (plan.checkpoint.tokenizer.format, plan.checkpoint.tokenizer.directory) == ("hf", other)


@pytest.mark.parametrize(
    ("changes", "settings", "error", "words"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            {},
            PluginNotFound,
            "pip install pegboard-model-llama",
        ),
        ({"quantization_config": {"quant_method": "odd"}}, {}, PluginNotFound, "odd"),
        ({"architectures": []}, {}, ModelError, "no architecture"),
        ({"vocab_size": None}, {}, ModelError, "vocab_size=None"),
        ({"weights": "model.bin"}, {}, ModelError, "no installed weight loader reads .*model.bin"),
        ({"data": b"nonsense"}, {}, ModelError, "no installed weight loader"),
        ({}, {"max_model_len": 129}, ConfigError, "exceeds the model's limit of 128"),
        ({}, {"load_format": "gguf"}, PluginNotFound, "pip install pegboard-pack-gguf"),
        ({}, {"quantization": "none"}, None, ""),
        (
            {},
            {"override_generation_config": {"nonsense": 1}},
            ConfigError,
            "'nonsense' is not a sampling default",
        ),
        (
            {"auto_map": {"AutoModel": "code.Model"}},
            {"trust_remote_code": True},
            ConfigError,
            "never runs code",
        ),
        ({"auto_map": {"AutoModel": "code.Model"}}, {}, None, ""),
        ({}, {"trust_remote_code": True}, None, ""),
    ],
)
def test_what_cannot_work_is_said_early(model, changes, settings, error, words):
    if error is None:
        resolve(engine_settings(model(**changes), settings))
        return
    with pytest.raises(error, match=words):
        resolve(engine_settings(model(**changes), settings))


@pytest.mark.parametrize(
    ("hub", "transformers", "offline"),
    [
        ("1", "", True),
        ("0", "", False),
        ("", "yes", True),
        ("true", "0", True),
        ("0", "1", False),
        ("", "", False),
    ],
)
def test_the_hubs_variables_switch_downloads_off(model, monkeypatch, hub, transformers, offline):
    """As huggingface_hub reads them: the first that is not empty counts."""
    monkeypatch.setenv("HF_HUB_OFFLINE", hub)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", transformers)
    with pytest.raises(ModelError, match="nothing is downloaded") if offline else nullcontext():
        resolve(engine_settings(model(), {}))


def test_asking_for_another_quantization_than_the_checkpoints(model):
    with pytest.raises(
        ConfigError, match="'none' was asked for, but the checkpoint is quantized with 'toy4'"
    ):
        resolve(
            engine_settings(
                model(quantization_config={"quant_method": "toy4"}), {"quantization": "none"}
            )
        )


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"max_position_embeddings": 100, "n_positions": 90}, 90),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2.0}}, 200),
        (
            {
                "max_position_embeddings": 100,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            100,
        ),
        (
            {
                "max_position_embeddings": 400,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 50,
                },
            },
            200,
        ),
        ({"text_config": {"max_position_embeddings": 70}}, 70),
        ({}, 2048),
    ],
)
def test_longest_length(config, length):
    assert max_model_len(config, None) == length
    assert max_model_len(config, 10) == 10
    if config:
        with pytest.raises(ConfigError):
            max_model_len(config, length + 1)


def test_why_explains_what_was_chosen_for_a_model(model, capsys):
    path = model()
    why = Why(None, command_setup("plugins-why")).run
    assert why(["model", "--model", path]) == 1, "the toy model cannot be built"
    told = capsys.readouterr()
    assert "model ToyForCausalLM → ToyForCausalLM" in told.out
    assert "this model cannot run: " in told.out and "acme_plugins" in told.err
    assert why(["attention", "--model", path]) == 1
    assert "this model cannot run: " in capsys.readouterr().err
    assert why(["tool_parser", "--model", path, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["winner"], facts["rank"]) == (None, "no installed family fits")
    assert why(["sampler", "--model", path]) == 1


def test_check_says_that_a_model_which_cannot_be_built_does_not_run(model, capsys):
    assert Check(None, command_setup("check")).run([model()]) == 1
    told = capsys.readouterr().out
    assert "\nruns      no\nwhy       " in told and "acme_plugins" in told

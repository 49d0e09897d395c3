"""The command line: flags generated from settings, config files, one-line errors, and the cost of
asking for help."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.cli.flags import FlagParser, number, split_dotted
from pegboard.cli.main import commands, main
from pegboard.config.schema import DRAFTS
from pegboard.config.sections import all_settings, sections
from pegboard.errors import ConfigError, UsageError
from pegboard.plugins import discovery
from pegboard.plugins.options import gather, raw_values
from pegboard_server.settings import ServerConfig
from pegboard_testing.fake_distributions import spec_source


def make_parser() -> FlagParser:
    parser = FlagParser(prog="pegboard word")
    parser.add_settings("server", "engine", "plugins")
    return parser


def parse(*words: str):
    return make_parser().parse_settings(words)[0]


@pytest.fixture(autouse=True)
def no_config_file(monkeypatch):
    monkeypatch.delenv("PEGBOARD_CONFIG", raising=False)


def struct(settings, section):
    return {"engine": settings.engine, "plugins": settings.plugins, **settings.sections}[section]


def example(setting):
    """Return a value for a setting, and the command-line words that set it."""
    text = str(setting.type)
    flag = f"--{'plugins-' if setting.section == 'plugins' else ''}{setting.name}"
    if setting.type is bool:
        value = not setting.default
        return value, [flag if value else flag.replace("--", "--no-", 1)]
    if setting.name == "structured_outputs_config":
        return {"backend": "x"}, [flag, '{"backend": "x"}']
    if setting.name == "eplb_config":
        return {"step_interval": 7}, [flag, '{"step_interval": 7}']
    if setting.name in ("tensor_parallel_size", "pipeline_parallel_size"):
        return 1, [flag, "1"]
    if setting.name == "dtype":
        return "float32", [flag, "float32"]
    if setting.name == "show_hidden_metrics_for_version":
        return "0.12", [flag, "0.12"]
    if "dict[str, str]" in text:
        return {"a": "b"}, [flag, '{"a": "b"}']
    if "dict" in text:
        return {"a": {"b": 1}}, [flag, '{"a": {"b": 1}}']
    if "list" in text:
        return ["x", "y"], [flag, "x", "y"]
    if "Literal" in text and not re.search(r"\bint\b", text):
        value = text.split("'")[3]
        return value, [flag, value]
    for name, value in [("int", 7), ("float", 0.5), ("str", "word")]:
        if setting.type == {"int": int, "float": float, "str": str}[name] or text.startswith(
            (name, f"typing.Union[{name}")
        ):
            return value, [flag, str(value)]
    raise AssertionError(text)


EXPERTS = ["--enable-expert-parallel", "--tensor-parallel-size", "2"]
SPECULATIVE = [setting.name for setting in all_settings().values() if setting.needs == DRAFTS]
EVERY = [setting for setting in all_settings().values() if setting.name != "options"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("setting", EVERY, ids=lambda setting: f"{setting.section}.{setting.name}")
@pytest.mark.parametrize("style", ["_", "-"])
def test_every_setting_has_a_flag_that_sets_it(setting, style):
    value, words = example(setting)
    words = [words[0].replace("_", style), *words[1:]]
    needed = all_settings().get(setting.needs or "")
    more = {
        **dict.fromkeys(SPECULATIVE, ["--spec-method", "x"]),
        "target_itl_ms": [],
        **dict.fromkeys(
            ("data_parallel_size_local", "data_parallel_start_rank", "data_parallel_rank"),
            ["--data-parallel-size", "8"],
        ),
        "enable_eplb": EXPERTS,
        "eplb_config": [*EXPERTS, "--enable-eplb"],
        "max_long_partial_prefills": ["--max-num-partial-prefills", "7"],
    }.get(setting.name, [] if needed is None else example(needed)[1])
    settings = parse(*words, *more)
    assert getattr(struct(settings, setting.section), setting.name) == value
    assert settings.sources[setting.name] == "the command line"


def test_defaults_and_the_model():
    assert parse().engine == parse("--no-trust-remote-code").engine
    assert parse("org/name", "--enforce-eager").engine.model == "org/name"
    assert parse("--model", "org/name").engine.model == "org/name"
    with pytest.raises(UsageError, match="two models"):
        parse("a", "--model", "b")


def test_options_of_plugins_and_parts_of_mappings():
    settings = parse(
        "--attention.triton.num_splits",
        "4",
        "--model-source.hub.retry-count=3",
        "--hf-overrides.rope.factor",
        "2.0",
    )
    assert settings.plugins.options == {
        "attention.triton": {"num_splits": "4"},
        "model_source.hub": {"retry_count": "3"},
    }
    assert settings.engine.hf_overrides == {"rope": {"factor": 2.0}}
    for words, message in [
        (["--atention.triton.x", "1"], "did you mean 'attention'"),
        (["--attention.triton.x"], "needs a value"),
        (["--attention.x", "1"], "expected --kind.name.field"),
    ]:
        with pytest.raises(UsageError, match=message):
            parse(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modl-len", "3"], "unknown flag --max-modl-len, did you mean '--max-model-len'"),
        (["--max-model", "3"], "unknown flag --max-model"),  # no abbreviations
        (["m", "extra"], "unexpected argument 'extra'"),
        (["--port", "many"], "not a number"),
        (["--port", "0.5k2"], "not a number"),
        (["--logprobs-mode", "x"], "invalid choice"),
        (["--hf-overrides", "{"], "not JSON"),
        (["--hf-overrides", "[]"], "not a JSON object"),
    ],
)
def test_wrong_usage(words, message):
    with pytest.raises(UsageError, match=message):
        parse(*words)


@given(st.integers(0, 10**6))
def test_human_numbers(value):
    assert number(str(value)) == value
    assert number(f"{value}k") == value * 1000
    assert number(f"{value}K") == value * 1024
    assert number("-1") == -1 and number("25.6k") == 25600


def test_auto_is_a_length_and_no_other_number():
    assert parse("--max-model-len", "auto").engine.max_model_len == "auto"
    assert parse("--max-model-len", "4k").engine.max_model_len == 4000
    for flag in ("--max-num-seqs", "--port", "--seed"):
        with pytest.raises(UsageError, match="'auto' is not a number"):
            parse(flag, "auto")


@given(st.lists(st.sampled_from(["--port", "1", "model", "--seed=0.5", "-tp"]), max_size=6))
def test_words_without_dots_pass_through(words):
    assert split_dotted(words) == (words, [])


def test_files_then_command_line(tmp_path, monkeypatch):
    low = tmp_path / "low.toml"
    low.write_text(
        'model = "low"\nport = 1\nmax-num-seqs = 3\n[attention.triton]\nnum_splits = 2\nother = 1\n'
    )
    high = tmp_path / "high.yaml"
    high.write_text(
        "engine: {model: high}\nserver:\n  port: 2\nplugins: {deny: [acme]}\nattention: {triton: "
        "{num_splits: 3}}\n"
    )
    monkeypatch.setenv("PEGBOARD_CONFIG", str(low))
    settings = parse("--config", str(high), "--port", "3", "--attention.triton.other", "9")
    assert (
        settings.engine.model,
        settings.section(ServerConfig).port,
        settings.engine.max_num_seqs,
    ) == (
        "high",
        3,
        3,
    )
    assert settings.plugins.options == {"attention.triton": {"num_splits": 3, "other": "9"}}
    assert settings.plugins.deny == ["acme"]
    assert settings.sources["model"] == str(high) and settings.sources["port"] == "the command line"
    assert settings.sources["max_num_seqs"] == str(low)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "max_model_length = 3", "did you mean 'max_model_len'"),
        ("a.toml", "port = 'x'", "a.toml"),
        ("a.toml", "port = ", "a.toml"),
        ("a.yaml", "a: [", "a.yaml"),
        ("a.yaml", "- 1", "expected settings by name"),
        ("a.ini", "", "ends in .toml"),
        ("missing/a.toml", None, "No such file"),
    ],
)
def test_bad_config_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(path))


def test_errors_are_one_line_and_a_status(capsys, monkeypatch):
    assert main(["serve", "--zzzz"]) == 2
    assert capsys.readouterr().err == "pegboard: error: unknown flag --zzzz\n"
    assert main(["srve"]) == 2
    assert "did you mean 'serve'" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:9/v1", "-q", "hi"]) == 1
    assert "is the server running?" in capsys.readouterr().err
    monkeypatch.setenv("PEGBOARD_LOG_LEVEL", "DEBUG")
    with pytest.raises(UsageError):
        main(["serve", "--nonsense"])


def test_help(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(command.removeprefix("plugins-") in shown for command in commands())
    assert main(["--help"]) == 0 and capsys.readouterr().out == shown


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["serve", "--help"]])
def test_help_imports_nothing_heavy(words):
    script = (
        "import sys\nfrom pegboard.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'uvicorn', 'starlette', 'zmq', "
        "'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from pegboard.interfaces import KINDS\n"
        f"wanted = {'pegboard_server' if words[0] == 'serve' else 'none'!r}\n"
        "loaded = {name.partition('.')[0] for name in sys.modules if "
        "name.startswith('pegboard_')} - {wanted}\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_front_imports_no_torch_and_no_numpy():
    script = (
        "import sys, pegboard.front.llm, pegboard.front.async_llm, "
        "pegboard.engine.boundary.client, pegboard_server.server\n"
        "import pegboard_server.serve\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_parsers_keep_values_with_underscores():
    parser = FlagParser(prog="x")
    parser.add_argument("--some-name")
    assert parser.parse(["--some_name", "a_b"]).some_name == "a_b"
    assert parser.parse(["--some_name=a_b"]).some_name == "a_b"


# --- commands of plugins --------------------------------------------------------------------------

GREET = """
class Greet:
    def __init__(self, options, setup):
        self.parser = setup.parser(prog="pegboard greet")
        self.parser.add_argument("--times", type="number", default=1)
        self.parser.add_settings("engine", only={"engine": ["max_model_len"]})

    def run(self, words):
        settings, arguments = self.parser.parse_settings(words, {"engine": {"max_model_len": 7}})
        print(f"hello {settings.engine.model}, {settings.engine.max_model_len}, {arguments.times}")
        return 5
"""


@pytest.fixture
def fakes(fake_distributions, monkeypatch):
    """Install a distribution with the command `greet`."""
    spec = spec_source("command", implementation="greet_command:Greet")
    points = {"command": {"greet": "greet_spec:SPEC"}}
    fake_distributions.add("acme-greet", points, {"greet_spec": spec, "greet_command": GREET})
    monkeypatch.setattr(discovery, "scan", fake_distributions.scan)
    return fake_distributions


def test_an_authors_own_command(fakes, capsys):
    assert main(["greet", "org/name", "--times", "2k"]) == 5
    assert capsys.readouterr().out == "hello org/name, 7, 2000\n"
    assert main(["greet", "--max-model-len", "9"]) == 5
    assert capsys.readouterr().out == "hello None, 9, 1\n"
    assert main(["greet", "--max-num-seqs", "9"]) == 2
    assert main(["greet", "--max-model-len", "0"]) == 2 and "at least 1" in capsys.readouterr().err
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "greet" in shown and "plugins list" in shown and main(["plugins", "list"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["greet", "--help"])
    assert "--times" in capsys.readouterr().out


def test_two_commands_of_one_name(fakes, capsys):
    fakes.add("twin", {"command": {"greet": "greet_spec:SPEC"}})
    assert main(["greet"]) == 1
    assert "write 'acme-greet:greet' or 'twin:greet'" in capsys.readouterr().err
    assert main(["twin:greet"]) == 5


def test_an_allow_list_hides_no_command_and_a_deny_list_does(fakes, capsys, monkeypatch, tmp_path):
    fakes.add("other", {"sampler": {"x": "nowhere:X"}})
    monkeypatch.setenv("PEGBOARD_PLUGINS", "other")
    assert main(["greet"]) == 5
    path = tmp_path / "rules.toml"
    path.write_text('plugins = {deny = ["acme-greet"]}\n')
    monkeypatch.setenv("PEGBOARD_CONFIG", str(path))
    assert main(["greet"]) == 1
    assert "denied by 'acme-greet'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "distribution"),
    [(["serve"], "pegboard-server"), (["plugins", "doctor"], "pegboard-doctor")],
)
def test_a_command_that_could_be_installed(fakes, capsys, words, distribution):
    assert main(words) == 2
    assert f"pip install {distribution}" in capsys.readouterr().err


# --- a newcomer's help ----------------------------------------------------------------------------


def test_help_of_a_command_is_short_and_grouped():
    short = make_parser().format_help()
    full = io.StringIO()
    with contextlib.redirect_stdout(full), pytest.raises(SystemExit):
        make_parser().parse(["--help=all"])
    assert short.count("\n") < full.getvalue().count("\n") / 3
    assert (
        all(f"\n{section} settings:" in short for section in sections())
        and "--max-model-len" in short
    )
    assert "--help=all" in short and "--kv-cache-metrics-sample" not in short
    assert "--max-model-len" in full.getvalue() and "--kv-cache-metrics-sample" in full.getvalue()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--gpu-memory", "--gpu-memory-utilization"),
        ("--prot", "--port"),
        ("--max_seqs", "--max-num-seqs"),
        ("--tensor-parallel", "--tensor-parallel-size"),
        ("--api-keys", "--api-key"),
    ],
)
def test_a_suggestion_is_near(typed, meant):
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        parse(typed, "1")


@pytest.mark.parametrize("typed", ["--foo", "--xyz-size", "--verbosity-of-words", "--temperature"])
def test_what_is_near_nothing_gets_no_suggestion(typed):
    with pytest.raises(UsageError) as told:
        parse(typed, "1")
    assert "did you mean" not in str(told.value)


def test_the_keys_of_eplb_have_flags():
    settings = parse(
        *("-ep", "-tp", "2", "--enable-eplb", "--eplb-config.step_interval", "5"),
        "--eplb-config.num-redundant-experts=2",
    )
    expected = {"step_interval": 5, "num_redundant_experts": 2}
    assert settings.engine.eplb_config == expected
    json = parse("-ep", "-tp", "2", "--enable-eplb", "--eplb-config", '{"step_interval": 5}')
    assert json.engine.eplb_config == {"step_interval": 5}


def test_dashes_and_underscores_in_dotted_names(fake_distributions):
    settings = parse(
        "--structured-outputs-config.disable-any-whitespace",
        "true",
        "--hf-overrides.rope-scaling.rope-type=x",
        "--kv-connector.my-store.max-size",
        "3",
    )
    assert settings.engine.structured_outputs_config == {"disable_any_whitespace": True}
    assert settings.engine.hf_overrides == {"rope_scaling": {"rope_type": "x"}}
    fake_distributions.add("acme", {"kv_connector": {"my_store": "acme_store:SPEC"}}, {})
    entries = fake_distributions.scan().entries
    raw = gather(entries, settings.plugins.options)
    assert raw_values(entries[0], raw) == {"max_size": "3"}
    with pytest.raises(UsageError, match="was also given"):
        parse("--hf-overrides.a", "1", "--hf-overrides.a.b", "2")

"""vLLM's names for settings: flags, config files and `LLM(...)` accept or refuse them, and never ignore them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.cli.flags import FlagParser
from pegboard.config.schema import ServerConfig, check_server
from pegboard.config.sources import engine_settings, is_vllm_name
from pegboard.config.vllm_names import ABSENT, ALIASES, FORMS, refuse
from pegboard.errors import ConfigError, UsageError

REFUSED = sorted(name for name in ABSENT if is_vllm_name(name))


def make_parser() -> FlagParser:
    parser = FlagParser(prog="pegboard word")
    parser.add_settings("server", "engine", "plugins")
    return parser


def parse(*words: str):
    return make_parser().parse_settings(words)[0]


@pytest.fixture(autouse=True)
def no_config_file(monkeypatch):
    monkeypatch.delenv("PEGBOARD_CONFIG", raising=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_act_is_refused_with_the_reason(name, tmp_path):
    """It is refused as a flag (exit status 2), in a file and as an argument. A value that asks for what Pegboard does anyway is
    accepted."""
    absent = ABSENT[name]
    flag = f"--{name.replace('_', '-')}"
    wanted = absent.agrees == ("false",) if absent.is_flag else "something-else"
    words = ([flag] if wanted else [flag.replace("--", "--no-")]) if absent.is_flag else [flag, "something-else"]
    with pytest.raises(UsageError) as told:
        parse("model", *words)
    assert absent.reason in str(told.value) and flag.removeprefix("--") in str(told.value)
    with pytest.raises(ConfigError) as told:
        engine_settings("model", {name: wanted})
    assert absent.reason in str(told.value)
    path = tmp_path / "config.yaml"
    path.write_text(f"{name.replace('_', '-')}: {str(wanted).lower()}\n")
    with pytest.raises(ConfigError) as told:
        parse("--config", str(path))
    assert absent.reason in str(told.value)


@pytest.mark.parametrize("name", [name for name in REFUSED if ABSENT[name].agrees])
def test_what_happens_anyway_may_be_said(name):
    absent = ABSENT[name]
    flag = f"--{name.replace('_', '-')}"
    for value in absent.agrees:
        if absent.is_flag:
            words = [flag if value == "true" else flag.replace("--", "--no-")]
        else:
            words = [f"{flag}={value}"]
        assert parse("model", *words).engine == parse("model").engine
        assert parse(*words, "model").engine.model == "model"


def test_tables_do_not_overlap():
    assert not set(ABSENT) & set(FORMS) and not set(ALIASES) & (set(ABSENT) | set(FORMS))


def test_short_forms():
    assert parse("-asc", "2").server.api_server_count == 2
    assert parse("-sc", '{"method": "x", "num_speculative_tokens": 2}').engine.spec_method == "x"
    assert parse("-sc.method", "x", "-sc.num_speculative_tokens=2").engine.spec_tokens == 2
    assert parse("-O0", "model").engine.model == "model"
    assert parse("-cc.mode", "0", "-dp", "1").engine == parse().engine
    for words, told in [
        (["-O3"], "only 0"),
        (["-O", "2"], "only 0"),
        (["-cc.mode", "3"], "platform"),
        (["-dp", "2"], "one engine"),
    ]:
        with pytest.raises(ConfigError, match=told):
            parse(*words)


@pytest.mark.parametrize(
    ("words", "engine", "options"),
    [
        (
            ["--speculative-config", '{"method": "m", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'],
            {"spec_method": "m", "spec_tokens": 3},
            {"draft.m": {"prompt_lookup_max": 4}},
        ),
        (
            ["--kv-transfer-config", '{"kv_connector": "C", "kv_role": "kv_both", "kv_connector_extra_config": {"a": 1},'
             ' "kv_load_failure_policy": "fail"}'],
            {"kv_connectors": ["C"], "kv_load_failure_policy": "fail"},
            {"kv_connector.C": {"a": 1}},
        ),
        (
            ["--kv-transfer-config.kv_connector", "C", "--kv-transfer-config.kv_role", "kv_producer"],
            {"kv_connectors": ["C"]},
            {"kv_connector.C": {"role": "kv_producer"}},
        ),
        (["--attention-config", '{"backend": "A", "x": 1}'], {"attention_backend": "A"}, {"attention.A": {"x": 1}}),
        (["--compilation-config", '{"mode": 0}'], {}, {}),
        (["--enable-lora"], {"max_loras": 1}, {}),
        (["--enable-lora", "--max-loras", "4"], {"max_loras": 4}, {}),
        (["--async-scheduling"], {"max_in_flight": 2}, {}),
        (["--no-async-scheduling"], {"max_in_flight": 1}, {}),
        (["--device-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}, {}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_other_forms(words, engine, options):
    settings = parse(*words)
    assert {name: getattr(settings.engine, name) for name in engine} == engine
    assert settings.plugins.options == options


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--speculative-config", "{}"], "needs 'method'"),
        (["--speculative-config", '{"method": "m"}'], "num_speculative_tokens"),
        (["--kv-transfer-config", '{"kv_connector": "C", "kv_port": 3}'], "'kv_port' does not exist"),
        (["--compilation-config", '{"backend": "inductor"}'], "platform"),
        (["--no-async-scheduling", "--max-in-flight", "2"], "was also given"),
        (["--speculative-config", "3"], "not a JSON object"),
        (["--swap-space"], "expected one argument"),
        (["--limit-mm-per-prompt.image", "2"], "multimodal"),
    ],
)
def test_forms_that_are_wrong(words, told):
    with pytest.raises(ConfigError, match=told):
        parse(*words)


def test_server_flags_of_vllm():
    server = parse(
        "--disable-uvicorn-access-log", "--allowed-origins", '["https://a", "https://b"]', "--shutdown-timeout", "3",
        "--ssl-certfile", "c", "--disable-log-requests", "--max-log-len", "2k", "--served-model-name", "a", "b",
    ).server  # fmt: skip
    assert server.disable_access_log and server.allowed_origins == ["https://a", "https://b"]
    assert server.shutdown_timeout_s == 3 and server.ssl_certfile == "c" and not server.enable_log_requests
    assert server.max_log_len == 2000
    assert parse("--allowed-methods", "GET", "POST").server.allowed_methods == ["GET", "POST"]
    with pytest.raises(UsageError, match="not a JSON list"):
        parse("--allowed-origins", "[x")


def test_a_config_file_as_vllm_has_them(tmp_path):
    """A file may have flag names as keys, one item for a list, numbers with units, and nested configs. The command line overrides
    it."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: org/name\nserved-model-name: one\nmax-model-len: 4k\nenable-lora: true\ndisable-uvicorn-access-log: true\n"
        "speculative-config:\n  method: m\n  num_speculative_tokens: 2\napi-key: secret\ndata-parallel-size: 1\n"
    )
    settings = parse("--config", str(path), "--max-model-len", "1K")
    assert settings.engine.served_model_name == ["one"] and settings.engine.max_model_len == 1024
    assert settings.engine.max_loras == 1 and settings.engine.spec_tokens == 2
    assert settings.server.api_key == ["secret"] and settings.server.disable_access_log
    assert settings.sources["spec_method"] == str(path) and settings.sources["max_model_len"] == "the command line"
    assert (
        parse("--config", str(path), "--speculative-config", '{"method": "o", "num_speculative_tokens": 5}').engine.spec_tokens
        == 5
    )
    assert parse("other/model", "--config", str(path)).engine.model == "other/model"


def test_llm_takes_them_too():
    settings = engine_settings("m", {"speculative_config": {"method": "x", "num_speculative_tokens": 2}, "data_parallel_size": 1})
    assert settings.engine.spec_method == "x"
    with pytest.raises(ConfigError, match="must be a mapping"):
        engine_settings("m", {"speculative_config": 3})


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.dictionaries(st.text(max_size=2), st.integers())


@given(st.sampled_from(REFUSED), VALUES)
def test_refusing_never_breaks(name, value):
    try:
        refuse(name, value)
    except ConfigError as error:
        assert ABSENT[name].reason in str(error)


# --- help ---------------------------------------------------------------------------------------------------------------------


def shown(word, capsys):
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_settings([f"--help={word}"])
    assert not ended.value.code
    return capsys.readouterr().out


def test_help_of_a_word(capsys):
    assert "--port" in shown("server", capsys) and "--port" not in shown("engine", capsys)
    assert "--max-num-seqs" in shown("max-num", capsys)
    only = shown("max_num_seqs", capsys)
    assert "--max-num-seqs" in only and "--max-num-batched-tokens" not in only
    assert "engine" in shown("listgroup", capsys)
    assert "--port" in shown("all", capsys)
    refused = shown("pooler", capsys)
    assert "--pooler-config" in refused and ABSENT["pooler_config"].reason in refused
    with pytest.raises(UsageError, match="no flag matches"):
        parse("--help=zzzzz")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"api_server_count": 0}, "api_server_count"),
        ({"ssl_keyfile": "k"}, "needs ssl_certfile"),
        ({"ssl_cert_reqs": 3, "ssl_certfile": "c"}, "ssl_cert_reqs must be"),
        ({"ssl_cert_reqs": 2, "ssl_certfile": "c"}, "needs ssl_ca_certs"),
        ({"shutdown_timeout_s": -1.0}, "negative"),
        ({"enable_log_outputs": True}, "enable_log_requests"),
    ],
)
def test_server_settings_that_cannot_work(settings, told):
    check_server(ServerConfig())
    with pytest.raises(ConfigError, match=told):
        check_server(ServerConfig(**settings))

"""vLLM's names for settings: flags, config files and `LLM(...)` accept or refuse them, and never
ignore them."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard import env
from pegboard.cli.flags import FlagParser
from pegboard.config.data_parallel import engine_numbers
from pegboard.config.schema import EngineConfig
from pegboard.config.sections import all_settings
from pegboard.config.sources import engine_settings, is_vllm_name
from pegboard.config.vllm_names import (
    ABSENT,
    ALIASES,
    ENVIRONMENT,
    FORMS,
    refuse,
    translate,
    warn_once,
)
from pegboard.errors import ConfigError, UsageError
from pegboard.plugins.discovery import scan_path
from pegboard_server.settings import ServerConfig, check_server

REFUSED = sorted(name for name in ABSENT if is_vllm_name(name) and not ABSENT[name].warns)


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
    """It is refused as a flag (exit status 2), in a file and as an argument. A value that asks for
    what Pegboard does anyway is accepted."""
    absent = ABSENT[name]
    flag = f"--{name.replace('_', '-')}"
    wanted = absent.agrees == ("false",) if absent.is_flag else "something-else"
    words = (
        ([flag] if wanted else [flag.replace("--", "--no-")])
        if absent.is_flag
        else [flag, "something-else"]
    )
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
    assert not set(all_settings()) & (set(ABSENT) | set(FORMS)), (
        "a setting of Pegboard takes precedence"
    )


def test_short_forms():
    assert parse("-asc", "2").section(ServerConfig).api_server_count == 2
    assert parse("-sc", '{"method": "x", "num_speculative_tokens": 2}').engine.spec_method == "x"
    assert parse("-sc.method", "x", "-sc.num_speculative_tokens=2").engine.spec_tokens == 2
    assert parse("-O0", "model").engine.model == "model"
    assert parse("-dp", "1").engine == parse("-dpb", "mp").engine == parse().engine
    assert parse("-dpb", "ray").engine.data_parallel_launcher == "ray"
    hybrid = parse("-dp", "4", "-dpl", "2", "-dpr", "2", "-dph").engine
    assert list(engine_numbers(hybrid)) == [2, 3]
    assert list(engine_numbers(parse("-dp", "4", "-dpn", "3", "-dpe").engine)) == [3]
    for words, told in [
        (["-O5"], "expected 0, 1, 2, 3, got 5"),
        (["-cc.mode", "1"], "expected 0, none, 3, .* mode 0, or cudagraph_mode NONE"),
        (["-cc.cudagraph_mode=2"], "expected 0, none, 3, "),
        (["-O0", "--no-enforce-eager"], "was also given"),
        (["-cc", "0", "-cc.mode", "0"], "was also given"),
        (["-dpb", "slurm"], "expected mp, ray, got 'slurm'"),
        (["--kv-offloading-backend", "lmcache"], "expected native, got 'lmcache'"),
        (
            ["--kv-transfer-config", '{"kv_connector": "MultiConnector"}'],
            "needs kv_connector_extra_config.connectors, a list",
        ),
        (
            ["--kv-transfer-config", '{"kv_connector": "C"}', "--kv-offloading-size", "1"],
            "was also given",
        ),
    ]:
        with pytest.raises(ConfigError, match=told):
            parse(*words)


@pytest.mark.parametrize(
    ("words", "engine", "options"),
    [
        (
            [
                "--speculative-config",
                '{"method": "m", "num_speculative_tokens": 3, "prompt_lookup_max": 4}',
            ],
            {"spec_method": "m", "spec_tokens": 3},
            {"draft.m": {"prompt_lookup_max": 4}},
        ),
        (
            [
                "-sc",
                (
                    '{"method": "m", "num_speculative_tokens": 3, "disable_by_batch_size": 4, '
                    '"adaptive_length": false}'
                ),
            ],
            {"spec_method": "m", "spec_tokens": 3, "spec_max_rows": 4, "spec_adaptive": False},
            {},
        ),
        (
            [
                "-sc",
                (
                    '{"model": "m", "max_model_len": 50, "draft_tensor_parallel_size": 1, '
                    '"enforce_eager": true, "disable_padded_drafter_batch": true}'
                ),
            ],
            {
                "spec_method": None,
                "spec_model": "m",
                "spec_tokens": 0,
                "spec_max_model_len": 50,
                "spec_tensor_parallel_size": 1,
                "spec_enforce_eager": True,
                "spec_disable_padded_drafter_batch": True,
            },
            {},
        ),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector": "C", "kv_role": "kv_both", "kv_connector_extra_config": {"a": '
                "1},"
                ' "kv_load_failure_policy": "fail"}',
            ],
            {"kv_connectors": ["C"], "kv_load_failure_policy": "fail"},
            {"kv_connector.C": {"a": 1}},
        ),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector": "C", "engine_id": "e", "kv_rank": 1, "kv_parallel_size": 2, '
                '"kv_ip": "127.0.0.1", "kv_port": 14579, "kv_buffer_device": "cuda", '
                '"kv_buffer_size": 1e9, "kv_connector_module_path": null, '
                '"enable_permute_local_kv": false, "kv_connector_extra_config": null}',
            ],
            {"kv_connectors": ["C"]},
            {},
        ),
        (
            [
                "--kv-transfer-config.kv_connector",
                "C",
                "--kv-transfer-config.kv_role",
                "kv_producer",
            ],
            {"kv_connectors": ["C"]},
            {"kv_connector.C": {"role": "kv_producer"}},
        ),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector": "MultiConnector", "kv_load_failure_policy": "fail",'
                ' "kv_connector_extra_config": {"connectors": [{"kv_connector": "C", "kv_role": '
                '"kv_consumer"},'
                ' {"kv_connector": "D", "kv_role": "kv_both", "kv_connector_extra_config": {"a": '
                "1}}]}}",
            ],
            {"kv_connectors": ["C", "D"], "kv_load_failure_policy": "fail"},
            {"kv_connector.C": {"role": "kv_consumer"}, "kv_connector.D": {"a": 1}},
        ),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": ['
                '{"kv_connector": "C", "kv_connector_extra_config": {"a": 1}}, '
                '{"kv_connector": "D"}, '
                '{"kv_connector": "C", "kv_role": "kv_consumer", "kv_connector_extra_config": '
                '{"a": 2}}, {"kv_connector": "C"}]}}',
            ],
            {"kv_connectors": ["C", "D", "C@2", "C@3"]},
            {"kv_connector.C": {"a": 1}, "kv_connector.C@2": {"a": 2, "role": "kv_consumer"}},
        ),
        (
            ["--kv-offloading-size", "2.5", "--kv-offloading-backend", "native"],
            {"kv_connectors": ["OffloadingConnector"]},
            {"kv_connector.OffloadingConnector": {"size_gb": 2.5}},
        ),
        (
            ["--attention-config", '{"backend": "A", "x": 1}'],
            {"attention_backend": "A"},
            {"attention.A": {"x": 1}},
        ),
        (["--compilation-config", '{"mode": 0}'], {"enforce_eager": True}, {}),
        (["--compilation-config", "0"], {"enforce_eager": True}, {}),
        (["-cc.cudagraph-mode=NONE"], {"enforce_eager": True}, {}),
        (["-O0"], {"enforce_eager": True}, {}),
        (["-O", "2"], {"enforce_eager": False}, {}),
        (["-O1"], {"enforce_eager": False, "recording_mode": "piecewise"}, {}),
        (["-cc.cudagraph_mode=FULL"], {"enforce_eager": False, "recording_mode": "full"}, {}),
        (
            ["-cc", '{"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}'],
            {"enforce_eager": False, "recording_mode": "full_decode_only"},
            {},
        ),
        (["-cc", '{"cudagraph_mode": "NONE", "mode": 3}'], {"enforce_eager": True}, {}),
        (["--compilation-config", "{}"], {"enforce_eager": False}, {}),
        (["--cudagraph-capture-sizes", "[]"], {"enforce_eager": True}, {}),
        (["--max-cudagraph-capture-size", "0"], {"enforce_eager": True}, {}),
        (["--enable-lora"], {"max_loras": 1}, {}),
        (["--enable-lora", "--max-loras", "4"], {"max_loras": 4}, {}),
        (["--async-scheduling"], {"max_in_flight": 2}, {}),
        (["--no-async-scheduling"], {"max_in_flight": 1}, {}),
        (["--device-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}, {}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_forms(words, engine, options):
    settings = parse(*words)
    assert {name: getattr(settings.engine, name) for name in engine} == engine
    assert settings.plugins.options == options


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--speculative-config", "{}"], "needs 'method'"),
        (["--speculative-config", '{"method": ""}'], "needs 'method'"),
        (["--kv-transfer-config", '{"kv_connector": ""}'], "needs 'kv_connector'"),
        (["-sc", '{"model": "m", "x": 3}'], "'x' is an option of a plugin; name it with 'method'"),
        (["-sc", '{"num_speculative_tokens": 3}'], "needs 'method'"),
        (["-sc", '{"model": "m", "parallel_drafting": true}'], "only false"),
        (["-sc", '{"model": "m", "speculative_token_tree": "[(0,), (1,)]"}'], "only null"),
        (
            ["--kv-transfer-config", '{"kv_connector": "C", "kv_prot": 3}'],
            "'kv_prot' does not exist",
        ),
        *[
            (["--kv-transfer-config", json.dumps({"kv_connector": "C", key: value})], told)
            for key, value, told in [
                (
                    "kv_ip",
                    "10.0.0.1",
                    "kv_ip 10.0.0.1 has no effect .*only 127.*give host in",
                ),
                ("kv_port", 3, "kv_port 3 has no effect .*only 14579.*give port in"),
                ("kv_buffer_size", 5, "kv_buffer_size 5 has no effect .*an option of the conn"),
                ("enable_permute_local_kv", True, "only false.*same layout"),
                ("kv_connector_module_path", "my.module", "plugins new kv_connector NAME"),
            ]
        ],
        (
            [
                "--kv-transfer-config",
                '{"kv_connector": "MultiConnector", "kv_port": 3, "kv_connector_extra_config": '
                '{"connectors": [{"kv_connector": "C"}]}}',
            ],
            "kv_port 3 has no effect",
        ),
        (["--compilation-config", '{"backend": "inductor"}'], "mode 0, or cudagraph_mode"),
        (["--no-async-scheduling", "--max-in-flight", "2"], "was also given"),
        (["--speculative-config", "3"], "not a JSON object"),
        (["--swap-space"], "expected one argument"),
        (["--video-pruning-rate", "0.5"], "multimodal"),
    ],
)
def test_forms_that_are_wrong(words, told):
    with pytest.raises(ConfigError, match=told):
        parse(*words)


def test_server_flags_of_vllm():
    server = parse(
        "--disable-uvicorn-access-log",
        "--allowed-origins",
        '["https://a", "https://b"]',
        "--shutdown-timeout",
        "3",
        "--ssl-certfile",
        "c",
        "--disable-log-requests",
        "--max-log-len",
        "2k",
        "--served-model-name",
        "a",
        "b",
    ).section(ServerConfig)
    assert server.disable_access_log and server.allowed_origins == ["https://a", "https://b"]
    assert (
        server.shutdown_timeout_s == 3
        and server.ssl_certfile == "c"
        and not server.enable_log_requests
    )
    assert server.max_log_len == 2000
    assert parse("--allowed-methods", "GET", "POST").section(ServerConfig).allowed_methods == [
        "GET",
        "POST",
    ]
    with pytest.raises(UsageError, match="not a JSON list"):
        parse("--allowed-origins", "[x")


def test_a_config_file_as_vllm_has_them(tmp_path):
    """A file may have flag names as keys, one item for a list, numbers with units, and nested
    configs. The command line overrides it."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: org/name\nserved-model-name: one\nmax-model-len: 4k\nenable-lora: "
        "true\ndisable-uvicorn-access-log: true\n"
        "speculative-config:\n  method: m\n  num_speculative_tokens: 2\napi-key: "
        "secret\ndata-parallel-size: 1\n"
    )
    settings = parse("--config", str(path), "--max-model-len", "1K")
    assert settings.engine.served_model_name == ["one"] and settings.engine.max_model_len == 1024
    assert settings.engine.max_loras == 1 and settings.engine.spec_tokens == 2
    server = settings.section(ServerConfig)
    assert server.api_key == ["secret"] and server.disable_access_log
    assert (
        settings.sources["spec_method"] == str(path)
        and settings.sources["max_model_len"] == "the command line"
    )
    assert (
        parse(
            "--config",
            str(path),
            "--speculative-config",
            '{"method": "o", "num_speculative_tokens": 5}',
        ).engine.spec_tokens
        == 5
    )
    assert parse("other/model", "--config", str(path)).engine.model == "other/model"


def test_llm_takes_them_too():
    settings = engine_settings(
        "m",
        {
            "speculative_config": {"method": "x", "num_speculative_tokens": 2},
            "data_parallel_size": 1,
        },
    )
    assert settings.engine.spec_method == "x"
    with pytest.raises(ConfigError, match="must be a mapping"):
        engine_settings("m", {"speculative_config": 3})


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.dictionaries(st.text(max_size=2), st.integers())
)


@given(st.sampled_from(REFUSED), VALUES)
def test_refusing_never_breaks(name, value):
    try:
        refuse(name, value)
    except ConfigError as error:
        assert ABSENT[name].reason in str(error)


# --- help -----------------------------------------------------------------------------------------


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
    refused = shown("cudagraph_metrics", capsys)
    assert "--cudagraph-metrics" in refused and ABSENT["cudagraph_metrics"].reason in refused
    with pytest.raises(UsageError, match="no flag matches"):
        parse("--help=zzzzz")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"api_server_count": 0}, "api_server_count"),
        ({"ssl_keyfile": "k"}, "needs ssl_certfile"),
        ({"ssl_cert_reqs": 3, "ssl_certfile": "c"}, "ssl_cert_reqs must be"),
        ({"ssl_cert_reqs": 2, "ssl_certfile": "c"}, "needs ssl_ca_certs"),
        ({"shutdown_timeout_s": -1.0}, "at least 0"),
        ({"enable_log_outputs": True}, "enable_log_requests"),
        ({"allowed_methods": ["GET"]}, "allowed_methods needs allowed_origins"),
        ({"allowed_headers": ["X-A"]}, "needs allowed_origins"),
        ({"allow_credentials": True}, "needs allowed_origins"),
    ],
)
def test_server_settings_that_cannot_work(settings, told):
    check_server(ServerConfig())
    with pytest.raises(ConfigError, match=told):
        check_server(ServerConfig(**settings))


# --- values that vLLM ignores too, lists, environment ---------------------------------------------


@pytest.fixture
def fresh_warnings():
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


@pytest.mark.usefixtures("fresh_warnings")
def test_what_vllm_ignores_is_accepted_with_one_warning(caplog):
    for _ in range(2):
        assert parse("--swap-space", "16").engine == parse().engine
    assert [record.getMessage() for record in caplog.records] == [
        "swap_space 16 has no effect: a preempted request is recomputed; nothing is swapped"
    ]
    caplog.clear()
    # vLLM's default, and always so
    assert parse("--swap-space", "4", "--enable-server-load-tracking").engine == parse().engine
    assert not caplog.records
    with pytest.raises(UsageError, match="GET /load always tells the load"):
        parse("--no-enable-server-load-tracking")


def test_switches_of_apis_add_to_the_lists_of_plugins(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[plugins]\nenable = ["api:admin"]\ndisable = ["metrics:log"]\n')
    plugins = parse(
        "--config", str(path), "--disable-fastapi-docs", "--enable-tokenizer-info-endpoint"
    ).plugins
    assert plugins.enable == ["api:admin", "api:tokenizer_info"] and plugins.disable == [
        "metrics:log",
        "api:openapi",
    ]
    plugins = parse(
        "--plugins-enable",
        "api:admin",
        "--enable-tokenizer-info-endpoint",
        "--no-disable-fastapi-docs",
    ).plugins
    assert plugins.enable == ["api:admin", "api:tokenizer_info"] and plugins.disable == []


def test_reasons_name_only_what_exists():
    """A reason never says that plugins of a kind have an option for it, because that is not
    known."""
    for absent in ABSENT.values():
        assert absent.message or f"no installed plugin of kind '{absent.kind}'" in absent.reason
        assert ".NAME.FIELD" not in absent.reason


@pytest.mark.usefixtures("fresh_warnings")
def test_variables_of_vllm(monkeypatch, caplog):
    """Those with a meaning act, one line names each of the others, and what Pegboard does anyway is
    not mentioned."""
    for name, value in {
        "VLLM_API_KEY": "secret",
        "VLLM_LOGGING_LEVEL": "warning",
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1.5",
        "VLLM_LOGGING_CONFIG_PATH": "log.json",
        "VLLM_USE_V1": "1",
        "VLLM_NO_USAGE_STATS": "0",
        "VLLM_USE_MODELSCOPE": "True",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_HOST_IP": "",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PEGBOARD_API_KEY", raising=False)
    monkeypatch.delenv("PEGBOARD_LOG_LEVEL", raising=False)
    settings = parse("--max-num-seqs", "3")
    parse()
    assert (
        settings.engine.kv_cache_memory_bytes == 3 << 29
        and settings.section(ServerConfig).log_config_file == "log.json"
    )
    assert (
        settings.sources["kv_cache_memory_bytes"]
        == "the environment variable VLLM_CPU_KVCACHE_SPACE"
    )
    assert settings.engine.batch_invariant
    assert settings.plugins.deny == ["model_source:hub"]
    assert env.api_key() == "secret" and env.log_level() == "WARNING"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "secret" not in " ".join(told)
    for name in (
        "VLLM_ATTENTION_BACKEND has no effect in Pegboard; use --attention-backend",
        "VLLM_WORKER_MULTIPROC_METHOD",
    ):
        assert any(name in line for line in told)
    assert parse("--kv-cache-memory-bytes", "7").engine.kv_cache_memory_bytes == 7
    assert engine_settings("m", {}).engine.kv_cache_memory_bytes == 3 << 29
    monkeypatch.setenv("PEGBOARD_API_KEY", "own")
    assert env.api_key() == "own"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "lots")
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE: Expected `int"):
        parse()


def test_the_table_of_variables_names_settings():
    for where in ENVIRONMENT["sets"].values():
        assert len(where) == 1 and set(where) <= set(all_settings())
    for flag in ENVIRONMENT["instead"].values():
        assert flag.startswith("PEGBOARD_") or flag.split()[0] in set(make_parser().flags)


@given(st.sampled_from(sorted(FORMS)), VALUES)
def test_a_form_sets_something_or_is_refused(name, value):
    """No accepted value of a form is lost: it gives a layer, unless it is an empty mapping."""
    try:
        layer = translate(name, value, {})
    except ConfigError:
        return
    assert layer or value == {} or "at_least" in FORMS[name].rule
    for section, values in layer.items():
        assert all(all_settings()[field].section == section for field in values)


BACKENDS = [
    "CPU_ATTN",
    "CUSTOM",
    "CUTLASS_MLA",
    "FLASHINFER",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN",
    "FLASH_ATTN_MLA",
    "FLEX_ATTENTION",
    "IPEX",
    "NO_ATTENTION",
    "PALLAS",
    "ROCM_AITER_FA",
    "ROCM_AITER_MLA",
    "ROCM_AITER_MLA_SPARSE",
    "ROCM_AITER_TRITON_MLA",
    "ROCM_AITER_UNIFIED_ATTN",
    "ROCM_ATTN",
    "TORCH_SDPA",
    "TREE_ATTN",
    "TRITON_ATTN",
    "TRITON_MLA",
]


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_backends_of_vllm(name):
    """Each is one of the plugins of this repository, or is refused with a reason that names only
    backends that are there."""
    installed = {entry.name for entry in scan_path(sys.path).entries if entry.kind == "attention"}
    try:
        plugin = EngineConfig(attention_backend=name).attention_backend
    except ConfigError as error:
        others = [word.strip(";,.") for word in str(error).split(": ", 1)[1].split()]
        for other in set(others) & set(BACKENDS):
            assert EngineConfig(attention_backend=other).attention_backend in installed
    else:
        assert plugin in installed


def test_names_of_plugins_stay():
    assert EngineConfig(attention_backend="flash_attn").attention_backend == "flash_attn"


def test_load_formats_of_vllm():
    """The other formats are names of plugins. docs/load_formats.md lists them."""
    assert EngineConfig(load_format="hf").load_format == "auto"
    config = EngineConfig(load_format="bitsandbytes")
    assert (config.load_format, config.quantization) == ("auto", "bitsandbytes")
    assert EngineConfig(load_format="bitsandbytes", quantization="bitsandbytes") == config
    assert EngineConfig(load_format="pt", quantization="awq").quantization == "awq"
    with pytest.raises(ConfigError, match="bitsandbytes quantizes with bitsandbytes, not with awq"):
        EngineConfig(load_format="bitsandbytes", quantization="awq")
    with pytest.raises(ConfigError, match="load_format modelexpress: no plugin calls ModelExpress"):
        EngineConfig(load_format="modelexpress")


@pytest.mark.parametrize(("value", "load_format"), [("auto", "auto"), ("mistral", "mistral")])
def test_the_config_format_is_that_of_a_load_format(value, load_format):
    assert engine_settings(None, {"config_format": value}).engine.load_format == load_format

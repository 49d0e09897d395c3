"""All settings of the engine and the server. They are frozen and typed, and each has a help text.
Unknown names are refused.

A setting is declared once, in this file. The command line, the config file and the arguments of
`LLM(...)` follow from the declaration. `Settings.sources` records where every value came from. The
names are vLLM's. A plugin name is any string; it is checked after plugin discovery.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from pegboard.errors import ConfigError, did_you_mean

DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
NEEDS: Mapping[str, str] = _DATA["needs"]
"""Setting → the setting without which it has no effect."""
MOST_USED = frozenset(
    f"{section}.{name}" for section, names in _DATA["most_used"].items() for name in names
)
"""The settings that a command's short help shows, as section.name."""
SHORT_FLAGS: Mapping[str, str] = _DATA["short_flags"]
"""Long name of a flag → another name for it."""
SHORT_DTYPES: Mapping[str, str] = _DATA["short_dtypes"]
"""vLLM's short names of types → names of torch."""


def doc(text: str) -> Meta:
    return Meta(description=text)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. Sizes are in tokens unless the name says bytes or gb."""

    # model
    model: Annotated[
        str | None,
        doc("Model: directory, file, org/name or scheme:name; default: the default model"),
    ] = None
    revision: Annotated[str | None, doc("Branch, tag or commit of the model on its hub")] = None
    hf_token: Annotated[str | None, doc("Access token for the hub; default: HF_TOKEN")] = None
    tokenizer: Annotated[
        str | None, doc("Model reference to take the tokenizer from; default: the model")
    ] = None
    tokenizer_mode: Annotated[
        str, doc("Tokenizer plugin; auto = the one that fits the checkpoint")
    ] = "auto"
    chat_template: Annotated[
        str | None, doc("File with a Jinja chat template, or the template itself")
    ] = None
    skip_tokenizer_init: Annotated[
        bool, doc("Load no tokenizer; requests and answers are token ids only")
    ] = False
    dtype: Annotated[
        str, doc("Compute type: auto, float32 (or float), bfloat16, float16 (or half)")
    ] = "auto"
    max_model_len: Annotated[
        int | Literal["auto"] | None, doc("Maximum tokens of prompt plus output; auto: what fits")
    ] = None
    quantization: Annotated[
        str | None, doc("Quantization plugin; default: the one the checkpoint names")
    ] = None
    load_format: Annotated[str, doc("Weight loader plugin; auto = the one that fits the files")] = (
        "auto"
    )
    download_dir: Annotated[
        str | None, doc("Folder for downloaded models, of every source; default: PEGBOARD_CACHE")
    ] = None
    repack_cache_gb: Annotated[
        float,
        doc(
            "GB of disk, below download_dir, for weights repacked for this machine's kernels; 0 = "
            "keep none"
        ),
    ] = 16.0
    served_model_name: Annotated[
        list[str] | None, doc("Model names that clients may use; default: the model reference")
    ] = None
    seed: Annotated[int, doc("Seed of requests that give no seed")] = 0
    max_logprobs: Annotated[
        int, doc("Maximum number of logprobs that a request may ask for; -1 = no limit")
    ] = 20
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"],
        doc("Which values are returned as logprobs"),
    ] = "raw_logprobs"
    generation_config: Annotated[
        str, doc("Source of sampling defaults: auto = the model, vllm = none, or a directory")
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None, doc("Sampling defaults that override the model's (JSON)")
    ] = None
    trust_remote_code: Annotated[
        bool, doc("Accepted if the checkpoint has no code; code of a checkpoint never runs")
    ] = False
    hf_overrides: Annotated[
        dict[str, Any] | None, doc("Values that override the checkpoint's config (JSON)")
    ] = None
    # KV cache
    block_size: Annotated[int | None, doc("Tokens per KV block; default: the platform's")] = None
    mamba_block_size: Annotated[
        int | None, doc("Tokens between two states that the prefix cache keeps; default: 512")
    ] = None
    kv_cache_dtype: Annotated[
        str,
        doc(
            "Type in which keys and values are stored: a type of torch (float16, int8, "
            "float8_e4m3fn) or vLLM's name of one; auto = what the quantization method wants, "
            "else the compute type"
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool, doc("Take the scales of an fp8 KV cache from random tokens; deprecated in vLLM")
    ] = False
    kv_cache_memory_bytes: Annotated[
        int | None, doc("Size of the KV cache in bytes; default: from measured free memory")
    ] = None
    gpu_memory_utilization: Annotated[
        float, doc("Fraction of device memory to use if no KV cache size is given")
    ] = 0.92
    num_gpu_blocks_override: Annotated[int | None, doc("Exact number of KV blocks, for tests")] = (
        None
    )
    enable_prefix_caching: Annotated[
        bool, doc("Reuse KV blocks of requests that begin with the same tokens")
    ] = True
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "sha256_cbor"], doc("Hash algorithm for cached blocks")
    ] = "sha256"
    # scheduling
    max_num_batched_tokens: Annotated[
        int | None, doc("Maximum tokens computed in one step; default: the platform's")
    ] = None
    max_num_seqs: Annotated[
        int | None, doc("Maximum number of requests running at once; default: the platform's")
    ] = None
    enable_chunked_prefill: Annotated[bool, doc("Compute long prompts in chunks")] = True
    max_num_partial_prefills: Annotated[
        int, doc("Maximum number of prompts computed in chunks at the same time")
    ] = 1
    max_long_partial_prefills: Annotated[
        int, doc("How many of those may be longer than long_prefill_token_threshold")
    ] = 1
    long_prefill_token_threshold: Annotated[
        int, doc("Maximum number of tokens of one prompt per step; 0 = no limit")
    ] = 0
    target_itl_ms: Annotated[
        float | None,
        doc(
            "Target for the milliseconds between two tokens: prefill chunks are made small "
            "enough; default: none"
        ),
    ] = None
    scheduling_policy: Annotated[str | None, doc("Scheduling policy plugin; default: fcfs")] = None
    max_in_flight: Annotated[
        int | None,
        doc(
            "Steps submitted before the engine waits for the oldest; 1 = synchronous; default: "
            "the platform's"
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        int | None,
        doc(
            "How many completions may wait before more are refused (503); default: 8192 in a "
            "server, else no limit"
        ),
    ] = None
    # execution
    device: Annotated[str, doc("Platform plugin; auto = the one whose probe succeeds")] = "auto"
    num_threads: Annotated[
        int | None, doc("Number of compute threads; default: OMP_NUM_THREADS, or one per core")
    ] = None
    distributed_executor_backend: Annotated[
        str | None, doc("Executor plugin; default: in_process")
    ] = None
    tensor_parallel_size: Annotated[
        int, doc("Number of ranks that each layer is split over; this version runs only 1")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, doc("Number of pipeline stages, on their own ranks; this version runs only 1")
    ] = 1
    attention_backend: Annotated[
        str | None, doc("Attention plugin; default: the best one that can run the model")
    ] = None
    sampler: Annotated[str | None, doc("Sampler plugin")] = None
    enable_sleep_mode: Annotated[
        bool, doc("Allow sleep levels 1 and 2, which release the memory of an idle engine")
    ] = False
    enable_prompt_embeds: Annotated[bool, doc("Accept prompts that are embeddings")] = False
    worker_extension_cls: Annotated[
        str | None, doc("Class whose methods collective_rpc may call: module:Class")
    ] = None
    enforce_eager: Annotated[bool, doc("Do not record and replay the forward")] = False
    logits_processors: Annotated[
        list[str] | None, doc("Logits processor plugins or classes (module:Class), in order")
    ] = None
    runner: Annotated[
        Literal["auto", "generate", "pooling"], doc("Make text or vectors; auto = as the model")
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any] | None, doc("How vectors are made: pooling_type, use_activation (JSON)")
    ] = None
    # speculative decoding, structured output, LoRA, connectors: chosen plugins and their limits
    spec_method: Annotated[str | None, doc("Draft plugin for speculative decoding")] = None
    spec_tokens: Annotated[int, doc("Maximum number of draft tokens per step and request")] = 0
    spec_adaptive: Annotated[bool, doc("Verify fewer draft tokens where they are seldom right")] = (
        True
    )
    spec_max_rows: Annotated[
        int | None, doc("No drafts in steps with more requests; default: no limit")
    ] = None
    structured_outputs_config: Annotated[
        dict[str, Any],
        doc(
            "Structured output (JSON): backend (auto, a plugin or a list of plugins in order), "
            "disable_fallback, disable_any_whitespace, disable_additional_properties, "
            "enable_in_reasoning"
        ),
    ] = {}
    max_loras: Annotated[
        int, doc("Maximum number of different adapters in one step; 0 = LoRA off")
    ] = 0
    max_lora_rank: Annotated[int, doc("Largest adapter rank")] = 16
    max_cpu_loras: Annotated[
        int | None, doc("Number of adapters kept in memory; default: max_loras")
    ] = None
    lora_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], doc("Type of adapters; auto = dtype")
    ] = "auto"
    kv_connectors: Annotated[list[str] | None, doc("KV connector plugins, in order")] = None
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"], doc("What to do when a KV load fails")
    ] = "recompute"
    # output
    tool_call_parser: Annotated[
        str, doc("Tool parser plugin; auto = what the model family says, none = no parser")
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        doc("Reasoning parser plugin; auto = what the model family recommends, none = no parser"),
    ] = "auto"
    disable_log_stats: Annotated[
        bool, doc("Measure nothing: no statistics in the log and no engine metrics")
    ] = False
    show_hidden_metrics_for_version: Annotated[
        str | None,
        doc("Also show the metrics that vLLM has hidden since this version, such as 0.12"),
    ] = None
    kv_cache_metrics: Annotated[
        bool, doc("Measure how long KV blocks stay cached and how often they are reused")
    ] = False
    kv_cache_metrics_sample: Annotated[
        float, doc("Fraction of the KV blocks that kv_cache_metrics watches")
    ] = 0.01
    otlp_traces_endpoint: Annotated[
        str | None, doc("URL of the OpenTelemetry collector that gets a span per request")
    ] = None
    collect_detailed_traces: Annotated[
        list[str] | None,
        doc("Times to add to the spans: model (the forward), worker (whole steps) or all"),
    ] = None
    kv_events_config: Annotated[
        dict[str, Any], doc("KV events (JSON): enable_kv_cache_events, publisher, its options")
    ] = {}
    stream_interval: Annotated[int, doc("Number of tokens gathered before a chunk is streamed")] = 1

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        msgspec.structs.force_setattr(
            self, "kv_cache_dtype", SHORT_DTYPES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        )


class StructuredOutputsConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The keys of `EngineConfig.structured_outputs_config`.

    backend: which plugins are asked to compile a constraint. "auto" means all installed ones, best
    first. A name means only that one. A list means those, in the given order. disable_fallback:
    "auto" asks only the best plugin. disable_any_whitespace and disable_additional_properties apply
    to every request, as if the request had set them. enable_in_reasoning: a grammar applies from
    the first token on instead of after the reasoning.
    """

    backend: str | list[str] = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False

    @property
    def names(self) -> list[str]:
        """The plugins that were requested by name, in order. The list is empty for "auto"."""
        names = [self.backend] if isinstance(self.backend, str) else self.backend
        return [] if names == ["auto"] else names


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server."""

    host: Annotated[str, doc("IP address or host name to listen on")] = "127.0.0.1"
    port: Annotated[int, doc("Port to listen on; 0 = any free one")] = 8000
    uds: Annotated[str | None, doc("Unix socket to listen on instead")] = None
    root_path: Annotated[
        str,
        doc(
            "Path prefix of the server's URLs behind a proxy, such as /llm; the proxy may remove it"
        ),
    ] = ""
    api_server_count: Annotated[
        int, doc("Number of API processes, which share the address and the engine")
    ] = 1
    # access
    api_key: Annotated[
        list[str] | None,
        doc("API keys that clients may send; default: PEGBOARD_API_KEY or VLLM_API_KEY"),
    ] = None
    ssl_keyfile: Annotated[
        str | None, doc("Private key for HTTPS (PEM file); default: read from ssl_certfile")
    ] = None
    ssl_certfile: Annotated[
        str | None, doc("Certificate chain (PEM file); if given, the server uses HTTPS")
    ] = None
    ssl_ca_certs: Annotated[
        str | None, doc("Certificate authorities that sign client certificates (PEM file)")
    ] = None
    ssl_cert_reqs: Annotated[
        int, doc("Client certificates: 0 = none, 1 = optional, 2 = required")
    ] = 0
    ssl_ciphers: Annotated[
        str | None, doc("Cipher suites in OpenSSL's notation (TLS 1.2 and below)")
    ] = None
    enable_ssl_refresh: Annotated[
        bool, doc("Reload the key and certificates when their files change")
    ] = False
    allowed_origins: Annotated[
        list[str], doc("CORS: allowed origins of web pages, * = any; default: none")
    ] = []
    allowed_methods: Annotated[list[str], doc("CORS: allowed methods")] = msgspec.field(
        default_factory=lambda: ["*"]
    )
    allowed_headers: Annotated[list[str], doc("CORS: allowed request headers")] = msgspec.field(
        default_factory=lambda: ["*"]
    )
    allow_credentials: Annotated[bool, doc("CORS: allow cookies and credentials")] = False
    middleware: Annotated[
        list[str], doc("ASGI middleware around the whole server, as package.module.Name")
    ] = []
    # logging
    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug", "trace"],
        doc("Log level of the HTTP server"),
    ] = "info"
    log_config_file: Annotated[
        str | None,
        doc("JSON or YAML file with a logging configuration (logging.config.dictConfig)"),
    ] = None
    disable_access_log: Annotated[bool, doc("Do not write a log line for each HTTP request")] = (
        False
    )
    disable_access_log_for_endpoints: Annotated[
        list[str], doc("Paths that are not logged, such as /health,/metrics")
    ] = []
    log_error_stack: Annotated[
        bool, doc("Log the traceback of every error answer, also of those that the client caused")
    ] = False
    enable_log_requests: Annotated[bool, doc("Log every generation request")] = False
    enable_log_outputs: Annotated[
        bool, doc("Log the generated outputs; needs enable_log_requests")
    ] = False
    max_log_len: Annotated[
        int | None, doc("Maximum characters or ids per prompt or output in the log; default: all")
    ] = None
    # responses
    enable_request_id_headers: Annotated[bool, doc("Send X-Request-Id")] = False
    enable_prompt_tokens_details: Annotated[
        bool, doc("Report the number of cached prompt tokens in usage")
    ] = False
    enable_force_include_usage: Annotated[bool, doc("Send usage at the end of every stream")] = (
        False
    )
    trust_request_chat_template: Annotated[bool, doc("Accept chat templates from requests")] = False
    enable_auto_tool_choice: Annotated[
        bool, doc("Parse tool calls in answers to requests with tool_choice auto")
    ] = True
    exclude_tools_when_tool_choice_none: Annotated[
        bool, doc("Do not show tools to the model if tool_choice is none")
    ] = False
    tool_server: Annotated[
        list[str] | None,
        doc("MCP tool servers whose tools the Responses API may run, as host:port or URL"),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool, doc("Name tokens token_id:N in logprobs unless a request forbids it")
    ] = False
    response_role: Annotated[str, doc("Role of generated messages")] = "assistant"
    # LoRA adapters
    lora_modules: Annotated[
        list[Any] | None,
        doc("LoRA adapters that clients may use, as name=path or JSON with name and path"),
    ] = None
    lora_resolvers: Annotated[
        list[str] | None,
        doc(
            "LoRA resolver plugins, in the order in which they are asked; default: those that "
            "have options"
        ),
    ] = None
    lora_base_models: Annotated[
        list[str],
        doc(
            "More names that adapters may record for the base model if a resolver finds them; * = "
            "any"
        ),
    ] = []
    lora_resolver_wait_s: Annotated[
        float, doc("Seconds that a request waits for LoRA resolvers")
    ] = 30.0
    # limits
    max_body_bytes: Annotated[int, doc("Largest request body")] = 8 * 1024 * 1024
    max_prompts_per_request: Annotated[
        int, doc("Maximum number of prompts in one completion request")
    ] = 1024
    max_running_requests: Annotated[
        int, doc("Maximum number of HTTP requests handled at once; more are refused (503)")
    ] = 16384
    h11_max_incomplete_event_size: Annotated[
        int, doc("Maximum size of a request's head in bytes")
    ] = 64 * 1024
    h11_max_header_count: Annotated[int, doc("Maximum number of headers in a request")] = 256
    shutdown_timeout_s: Annotated[
        float, doc("Seconds that running requests have to finish when the server stops")
    ] = 5.0
    engine_stall_s: Annotated[
        float, doc("Seconds that a step may take before /health answers 503")
    ] = 60.0
    engine_end_s: Annotated[
        float, doc("Seconds that a step may take before the engine is ended")
    ] = 300.0
    plugin_call_s: Annotated[
        float, doc("Seconds that a request's plugin code may block the server before it is ended")
    ] = 10.0


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which plugins may be used, which ambient plugins are on, and the plugins' options by
    "kind.name"."""

    allow: Annotated[
        list[str] | None,
        doc("Use only these distributions or kind:name; default: everything installed"),
    ] = None
    deny: Annotated[list[str], doc("Never use these distributions or kind:name")] = []
    override: Annotated[
        list[str], doc("Distributions whose plugins may replace those of another distribution")
    ] = []
    enable: Annotated[
        list[str], doc("Ambient plugins to run in addition to the defaults, kind:name")
    ] = []
    disable: Annotated[
        list[str], doc("Default ambient plugins that should not run, kind:name")
    ] = []
    files: Annotated[
        list[str], doc("Python files with a plugin that is not installed, for development: FILE.py")
    ] = []
    lock: Annotated[
        str | None,
        doc("Lock file (pegboard plugins lock): refuse to start with other plugins or versions"),
    ] = None
    options: Annotated[dict[str, dict[str, Any]], doc("Plugin options by kind.name")] = {}


@dataclass(frozen=True)
class Settings:
    """All settings of a program. sources: field name → where its value came from ("command line", a
    file, a plugin, …). A field that is not in it has its default."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    plugins: PluginConfig = PluginConfig()
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_engine(self, source: str, **values: Any) -> "Settings":
        """Return a copy with some engine values replaced. `source` is recorded as the source of
        each of them."""
        engine = build(EngineConfig, {**msgspec.structs.asdict(self.engine), **values}, source)
        return Settings(
            engine, self.server, self.plugins, {**self.sources, **dict.fromkeys(values, source)}
        )


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "engine": EngineConfig,
    "server": ServerConfig,
    "plugins": PluginConfig,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting, as the command line and the help pages need it."""

    name: str
    section: str
    type: Any
    default: Any
    help: str


@cache
def settings_of(section: str) -> tuple[Setting, ...]:
    """Return all settings of a section in declaration order."""
    found = []
    hints = get_type_hints(SECTIONS[section], include_extras=True)
    for declared in msgspec.structs.fields(SECTIONS[section]):
        plain, meta = get_args(hints[declared.name])
        default = (
            declared.default
            if declared.default is not msgspec.NODEFAULT
            else declared.default_factory()
        )
        found.append(Setting(declared.name, section, plain, default, meta.description or ""))
    return tuple(found)


@cache
def all_settings() -> Mapping[str, Setting]:
    """Return the settings of all sections by name."""
    return {setting.name: setting for section in SECTIONS for setting in settings_of(section)}


def build(cls: type[Any], values: Mapping[str, Any], source: str) -> Any:
    """Return `cls(**values)` after a check of all types. Raises ConfigError, which names the
    setting, its value and the most similar known name."""
    names = [info.name for info in msgspec.structs.fields(cls)]
    for name in values:
        if name not in names:
            raise ConfigError(f"unknown setting {name!r} from {source}{did_you_mean(name, names)}")
    try:
        return msgspec.convert(dict(values), cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def structured_outputs_config(config: EngineConfig) -> StructuredOutputsConfig:
    """Check `config.structured_outputs_config` and return it as a struct. Raises ConfigError."""
    name = "structured_outputs_config"
    checked: StructuredOutputsConfig = build(
        StructuredOutputsConfig, config.structured_outputs_config, name
    )
    if "auto" in checked.names or not checked.backend:
        raise ConfigError(
            "structured_outputs_config: backend must be 'auto', a plugin or a list of plugins, "
            f"got {checked.backend!r}"
        )
    return checked


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError for values that cannot work together or are out of range, before anything
    is loaded."""
    _check_positive(config, _DATA["positive"]["engine"])
    if config.dtype not in DTYPES:
        raise ConfigError(
            f"dtype {config.dtype!r} is unknown{did_you_mean(config.dtype, DTYPES)}; expected "
            f"{', '.join(DTYPES)}"
        )
    # every rank would run the whole model
    if (world_size := config.tensor_parallel_size * config.pipeline_parallel_size) > 1:
        raise ConfigError(
            f"tensor_parallel_size × pipeline_parallel_size is {world_size}: this version runs a "
            "model on one rank"
        )
    if config.target_itl_ms is not None and not config.target_itl_ms > 0:
        raise ConfigError(f"target_itl_ms must be above 0, got {config.target_itl_ms}")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization must be in (0, 1], got {config.gpu_memory_utilization}"
        )
    if config.max_long_partial_prefills > config.max_num_partial_prefills:
        raise ConfigError("max_long_partial_prefills must not exceed max_num_partial_prefills")
    if config.max_loras < 0 or config.max_lora_rank < 1:
        raise ConfigError("max_loras must not be negative, and max_lora_rank must be at least 1")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"max_cpu_loras={config.max_cpu_loras} must be at least max_loras={config.max_loras}"
        )
    structured_outputs_config(config)
    if not 0 < config.kv_cache_metrics_sample <= 1:
        raise ConfigError(
            f"kv_cache_metrics_sample must be in (0, 1], got {config.kv_cache_metrics_sample}"
        )
    if (version := config.show_hidden_metrics_for_version) is not None and re.match(
        r"\d+\.\d+(\.|$)", version
    ) is None:
        raise ConfigError(
            "show_hidden_metrics_for_version: expected a version of vLLM such as 0.12, got "
            f"{version!r}"
        )
    _check_needs(config)


def check_server(config: ServerConfig) -> None:
    """Raise ConfigError for server values that are out of range or cannot work together."""
    _check_positive(config, _DATA["positive"]["server"])
    for name in (
        "shutdown_timeout_s",
        "engine_stall_s",
        "engine_end_s",
        "plugin_call_s",
        "lora_resolver_wait_s",
    ):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} must not be negative, got {getattr(config, name)}")
    if config.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError(
            "ssl_cert_reqs must be 0 (none), 1 (optional) or 2 (required), got "
            f"{config.ssl_cert_reqs}"
        )
    _check_needs(config)
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise ConfigError(
            "ssl_cert_reqs needs ssl_ca_certs, the authorities that client certificates are "
            "checked against"
        )


def _check_needs(config: msgspec.Struct) -> None:
    for name, value in msgspec.structs.asdict(config).items():
        if (
            name in NEEDS
            and value not in (None, all_settings()[name].default)
            and not getattr(config, NEEDS[name])
        ):
            raise ConfigError(f"{name} needs {NEEDS[name]}; without it, it has no effect")


def _check_positive(config: msgspec.Struct, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(config, name)
        # AUTO_LEN
        if isinstance(value, int) and value < 1 and (name, value) != ("max_model_len", -1):
            raise ConfigError(f"{name} must be at least 1, got {value}")

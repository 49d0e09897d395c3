"""vLLM's settings under vLLM's names: what is called differently here, what is said in another form, and what does not exist.

Three tables, used wherever settings are given (flags, config files, `LLM(...)`); a setting of `config/schema.py` with the same
name always comes first. A name that cannot act is refused with the reason; a value that asks for what happens anyway
(`--data-parallel-size 1`) is fine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ConfigError

Layer = dict[str, dict[str, Any]]

ALIASES = {
    "device_memory_utilization": "gpu_memory_utilization",
    "disable_uvicorn_access_log": "disable_access_log",
    "shutdown_timeout": "shutdown_timeout_s",
}
"""vLLM's name → ours, same meaning."""


@dataclass(frozen=True, slots=True)
class Form:
    """A setting of vLLM that sets others here. into(value, engine settings known so far) → a layer. Raises ConfigError."""

    type: Any
    help: str
    into: Callable[[Any, Mapping[str, Any]], Layer]


def _take(name: str, config: Mapping[str, Any], **known: str) -> dict[str, Any]:
    """Values of a JSON config under our names; `known` maps theirs to ours, "" = handled by the caller."""
    unknown = [key for key in config if key not in known]
    if unknown:
        raise ConfigError(f"{name}: {unknown[0]!r} does not exist here; expected {', '.join(known)}")
    return {known[key]: value for key, value in config.items() if known[key] and value is not None}


def _name_of(name: str, config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} needs {key!r}, the name of a plugin; got {value!r}")
    return value


def _speculative(config: Mapping[str, Any], known: Mapping[str, Any]) -> Layer:
    """method and num_speculative_tokens are ours; everything else is an option of the draft plugin."""
    method = _name_of("speculative_config", config, "method")
    tokens = config.get("num_speculative_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"speculative_config needs 'num_speculative_tokens', at least 1; got {tokens!r}")
    options = {key: value for key, value in config.items() if key not in ("method", "num_speculative_tokens")}
    layer: Layer = {"engine": {"spec_method": method, "spec_tokens": tokens}}
    return layer | ({"plugins": {"options": {f"draft.{method}": options}}} if options else {})


def _kv_transfer(config: Mapping[str, Any], known: Mapping[str, Any]) -> Layer:
    name = _name_of("kv_transfer_config", config, "kv_connector")
    engine = _take("kv_transfer_config", config, kv_connector="", kv_role="", kv_connector_extra_config="",
                   kv_load_failure_policy="kv_load_failure_policy")  # fmt: skip
    options = dict(config.get("kv_connector_extra_config") or {})
    if (role := config.get("kv_role")) not in (None, "kv_both"):
        options["role"] = role
    layer: Layer = {"engine": {**engine, "kv_connectors": [name]}}
    return layer | ({"plugins": {"options": {f"kv_connector.{name}": options}}} if options else {})


def _ec_transfer(config: Mapping[str, Any], known: Mapping[str, Any]) -> Layer:
    name = _name_of("ec_transfer_config", config, "ec_connector")
    _take("ec_transfer_config", config, ec_connector="", ec_role="", ec_connector_extra_config="")
    options = dict(config.get("ec_connector_extra_config") or {})
    if (role := config.get("ec_role")) not in (None, "ec_both"):
        options["role"] = role
    layer: Layer = {"engine": {"encoder_connector": name}}
    return layer | ({"plugins": {"options": {f"encoder_connector.{name}": options}}} if options else {})


def _attention(config: Mapping[str, Any], known: Mapping[str, Any]) -> Layer:
    """backend chooses the plugin; everything else is its option."""
    name = _name_of("attention_config", config, "backend")
    options = {key: value for key, value in config.items() if key != "backend"}
    layer: Layer = {"engine": {"attention_backend": name}}
    return layer | ({"plugins": {"options": {f"attention.{name}": options}}} if options else {})


def _compilation(config: Mapping[str, Any], known: Mapping[str, Any]) -> Layer:
    modes = {key: config[key] for key in ("mode", "level") if key in config}
    rest = [key for key in config if key not in modes]
    if rest or any(value not in (0, None, "NONE", "none") for value in modes.values()):
        what = rest[0] if rest else f"mode {next(iter(modes.values()))!r}"
        raise ConfigError(f"compilation_config: {what} does not exist here: steps run eagerly (mode 0); kernels are plugins")
    return {}


def _optimization(level: int, known: Mapping[str, Any]) -> Layer:
    if level != 0:
        raise ConfigError(f"optimization_level {level} does not exist here: every step runs eagerly (-O0); kernels are plugins")
    return {}


def _lora(enabled: bool, known: Mapping[str, Any]) -> Layer:
    if not enabled:
        return {"engine": {"max_loras": 0}}
    return {} if known.get("max_loras") else {"engine": {"max_loras": 1}}


def _async_scheduling(enabled: bool, known: Mapping[str, Any]) -> Layer:
    if not enabled:
        return {"engine": {"max_in_flight": 1}}
    return {} if (known.get("max_in_flight") or 1) > 1 else {"engine": {"max_in_flight": 2}}


FORMS = {
    "speculative_config": Form(dict, "Speculative decoding: method, num_speculative_tokens, options of the method", _speculative),
    "kv_transfer_config": Form(dict, "KV connector: kv_connector, kv_role, kv_connector_extra_config, …", _kv_transfer),
    "ec_transfer_config": Form(dict, "Encoder connector: ec_connector, ec_role, ec_connector_extra_config", _ec_transfer),
    "attention_config": Form(dict, "Attention: backend and options of it", _attention),
    "compilation_config": Form(dict, "Steps run eagerly: {\"mode\": 0} is the only one", _compilation),
    "optimization_level": Form(int, "Steps run eagerly: 0 is the only one", _optimization),
    "enable_lora": Form(bool, "LoRA adapters; --max-loras (default 1 then) says how many in one step", _lora),
    "async_scheduling": Form(bool, "Plan a step while the one before computes (--max-in-flight 2)", _async_scheduling),
    "disable_log_requests": Form(bool, "The opposite of --enable-log-requests",
                                 lambda value, known: {"server": {"enable_log_requests": not value}}),
}  # fmt: skip
"""vLLM's name → how it is said here."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A setting of vLLM that has nothing to act on here. agrees: values that ask for what happens anyway, as text."""

    reason: str
    agrees: tuple[str, ...] = ()
    is_flag: bool = False


def _switches(reason: str, names: str, agrees: str = "false") -> dict[str, Absent]:
    return {name: Absent(reason, (agrees,), True) for name in names.split()}


def _values(reason: str, names: str) -> dict[str, Absent]:
    """Names, each with the values that agree: `name` or `name=1|2`."""
    pairs = [word.partition("=") for word in names.split()]
    return {name: Absent(reason, tuple(values.split("|")) if equals else ()) for name, equals, values in pairs}


_ONE_ENGINE = "one engine serves here; put a load balancer in front of several servers, or share one with --api-server-count"
_ONE_NODE = "all ranks run on one machine; an executor plugin for several would bring its own options (--executor.NAME.FIELD)"
_NO_MOE = "there are no expert-parallel layers"
_NO_CODE = "code is never loaded by path; install it as a plugin (see docs/plugins.md)"
_NO_MEDIA = "no multimodal models are served"
_NO_POOLING = "only models that generate are served"
_NO_GRAPHS = "steps are not captured"
_METRICS = "metrics and traces come from metrics plugins, with options of their own (--metrics.NAME.FIELD)"
_LOADING = "the weight loader plugin decides; its options are --weight-loader.NAME.FIELD"
_NO_STATE = "no state-space models are served"

ABSENT: dict[str, Absent] = {
    **_values(_ONE_ENGINE, "data_parallel_size=1 data_parallel_rank=0 data_parallel_start_rank=0 data_parallel_size_local=1 "
              "data_parallel_address data_parallel_rpc_port data_parallel_backend=mp"),
    **_switches(_ONE_ENGINE, "headless data_parallel_hybrid_lb data_parallel_external_lb aggregate_engine_logging "
                "disable_nccl_for_dp_synchronization"),
    **_values(_ONE_NODE, "nnodes=1 node_rank=0 master_addr master_port decode_context_parallel_size=1 "
              "prefill_context_parallel_size=1 dcp_kv_cache_interleave_size=1 cp_kv_cache_interleave_size=1 "
              "max_parallel_loading_workers"),
    **_switches(_ONE_NODE, "ray_workers_use_nsight disable_custom_all_reduce"),
    **_switches(_NO_MOE, "enable_expert_parallel enable_eplb enable_dbo"),
    **_values(_NO_MOE, "all2all_backend eplb_config expert_placement_strategy=linear ubatch_size=0 dbo_decode_token_threshold "
              "dbo_prefill_token_threshold"),
    **_values(_NO_CODE, "worker_cls=auto worker_extension_cls scheduler_cls tool_parser_plugin reasoning_parser_plugin "
              "code_revision logits_processor_pattern"),
    **_values(_NO_MEDIA, "limit_mm_per_prompt={} mm_processor_kwargs media_io_kwargs={} mm_processor_cache_gb "
              "mm_processor_cache_type "
              "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode=weights mm_encoder_attn_backend video_pruning_rate "
              "allowed_local_media_path allowed_media_domains default_mm_loras"),
    **_switches(_NO_MEDIA, "enable_mm_embeds interleave_mm_strings skip_mm_profiling disable_chunked_mm_input "
                "trust_request_mm_kwargs"),
    **_values(_NO_POOLING, "runner=auto|generate convert=auto|none pooler_config io_processor_plugin"),
    **_values(_NO_GRAPHS, "cudagraph_capture_sizes=[] max_cudagraph_capture_size=0"),
    **_switches(_NO_GRAPHS, "cudagraph_metrics enable_layerwise_nvtx_tracing"),
    **_values(_METRICS, "kv_events_config profiler_config"),
    **_switches(_METRICS, "enable_mfu_metrics"),
    **_values(_LOADING, "safetensors_load_strategy=lazy model_loader_extra_config={} ignore_patterns pt_load_map_location=cpu "
              "config_format=auto hf_config_path"),
    **_switches(_LOADING, "use_tqdm_on_load", agrees="true"),
    **_values(_NO_STATE, "mamba_cache_dtype=auto mamba_ssm_cache_dtype=auto mamba_block_size mamba_cache_mode=none"),
    **_values("how the template takes content is read from the template", "chat_template_content_format=auto"),
    **_values("give them in each request as chat_template_kwargs", "default_chat_template_kwargs={}"),
    **_switches("ask for it in each request with the field of the same name", "return_tokens_as_token_ids"),
    **_values("adapters come from adapter plugins", "lora_modules max_cpu_loras lora_dtype=auto"),
    **_switches("adapters are sharded like the layer they change", "fully_sharded_loras"),
    **_values("the tokenizer's files are those of --tokenizer; name another revision there", "tokenizer_revision"),
    **_values("the model plugin is chosen by the architecture; --plugins-deny excludes one", "model_impl=auto"),
    **_switches("prompts are text or token ids", "enable_prompt_embeds"),
    **_switches("the engine cannot give its memory back while it lives", "enable_sleep_mode"),
    **_values("weights stay on the device", "cpu_offload_gb=0"),
    **_values("a preempted request is computed again; nothing is swapped", "swap_space=0"),
    **_values("a KV connector plugin would offload (--kv-connectors)", "kv_offloading_size kv_offloading_backend"),
    **_switches("scales come with the checkpoint", "calculate_kv_scales"),
    **_values("attention computes in the model's type", "override_attention_dtype"),
    **_switches("windows are always used where the model has them", "disable_sliding_window kv_sharing_fast_prefill"),
    **_switches("groups of layers always have their own blocks", "disable_hybrid_kv_cache_manager"),
    **_switches("there is no cascade attention", "disable_cascade_attn", agrees="true"),
    **_values("settings of a platform are its plugin's options (--platform.NAME.FIELD)", "additional_config={}"),
    **_switches("there are no generated documentation pages", "disable_fastapi_docs", agrees="true"),
    **_switches("API plugins are chosen with --plugins-enable and --plugins-disable", "tokens_only "
                "enable_tokenizer_info_endpoint enable_server_load_tracking"),
    **_switches("what the user did not cause is always logged with its traceback", "log_error_stack", agrees="true"),
    **_switches("the API server is a process of its own", "disable_frontend_multiprocessing"),
}  # fmt: skip
"""vLLM's name → why it cannot act here."""


def refuse(name: str, value: Any, said: str | None = None) -> None:
    """For a name of `ABSENT`: nothing when the value agrees with what happens anyway, else ConfigError. said: as typed."""
    absent = ABSENT[name]
    text = str(value).lower() if isinstance(value, bool) else str(value).strip("'\"")
    if value is None or text in absent.agrees or (not value and "{}" in absent.agrees):
        return
    agreeing = f" (only {' or '.join(absent.agrees)})" if absent.agrees and not absent.is_flag else ""
    raise ConfigError(
        f"{said or name} {value if not absent.is_flag else ''}".rstrip() + f" cannot act here{agreeing}: {absent.reason}"
    )


def translate(name: str, value: Any, known: Mapping[str, Any]) -> Layer:
    """The layer that vLLM's setting `name` (one of `FORMS`) means here. Raises ConfigError."""
    form = FORMS[name]
    if not isinstance(value, Mapping if form.type is dict else form.type):
        expected = {dict: "a mapping", int: "a number", bool: "true or false"}[form.type]
        raise ConfigError(f"{name} must be {expected}, got {value!r}")
    return form.into(value, known)

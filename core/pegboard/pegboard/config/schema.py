"""The settings of the engine and the rules about plugins. They are frozen and typed, and each has a
help text. Unknown names are refused.

A setting is declared once. `Settings.sources` records where every value came from. The names are
vLLM's. A plugin name is any string; it is checked after plugin discovery.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec

from pegboard.config.setting import Section, build, check, doc
from pegboard.config.vllm_names import our_name, quantization_for
from pegboard.errors import ConfigError, did_you_mean

DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")

DRAFTS = "spec_method or spec_model"
RecordingMode = Literal["full", "piecewise", "full_decode_only", "full_and_piecewise"]
"""The settings that turn on speculative decoding."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. Sizes are in tokens unless the name says bytes or gb."""

    # model
    model: Annotated[
        str | None,
        doc("Model: directory, file, org/name or scheme:name; default: the default model"),
    ] = None
    revision: Annotated[
        str | None, doc("Branch, tag or commit of the model on its hub", is_common=True)
    ] = None
    hf_token: Annotated[
        str | None, doc("Access token for the hub; default: HF_TOKEN", is_common=True)
    ] = None
    tokenizer: Annotated[
        str | None, doc("Model reference to take the tokenizer from; default: the model")
    ] = None
    tokenizer_mode: Annotated[
        str, doc("Tokenizer plugin; auto = the one that fits the checkpoint")
    ] = "auto"
    chat_template: Annotated[
        str | None, doc("File with a Jinja chat template, or the template itself", is_common=True)
    ] = None
    skip_tokenizer_init: Annotated[
        bool, doc("Load no tokenizer; requests and answers are token ids only")
    ] = False
    dtype: Annotated[
        str,
        doc("Compute type: auto, float32 (or float), bfloat16, float16 (or half)", is_common=True),
    ] = "auto"
    max_model_len: Annotated[
        int | Literal["auto"] | None,
        doc("Maximum tokens of prompt plus output; auto: what fits", is_common=True),
    ] = None
    quantization: Annotated[
        str | None,
        doc("Quantization plugin; default: the one the checkpoint names", is_common=True),
    ] = None
    activation_quantization: Annotated[
        Literal["auto", "checkpoint", "none"],
        doc(
            "Whether activations are rounded to 8 bits where the checkpoint asks for it (W8A8): "
            "auto = where that is faster"
        ),
    ] = "auto"
    load_format: Annotated[str, doc("Weight loader plugin; auto = the one that fits the files")] = (
        "auto"
    )
    download_dir: Annotated[
        str | None,
        doc(
            "Folder for downloaded models, of every source; default: PEGBOARD_CACHE", is_common=True
        ),
    ] = None
    repack_cache_gb: Annotated[
        float,
        doc(
            "GB of disk, below download_dir, for weights repacked for this machine's kernels; 0 = "
            "keep none"
        ),
    ] = 16.0
    served_model_name: Annotated[
        list[str] | None,
        doc("Model names that clients may use; default: the model reference", is_common=True),
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
    block_size: Annotated[
        int | None, doc("Tokens per KV block; default: the platform's", least=1)
    ] = None
    mamba_block_size: Annotated[
        int | None,
        doc("Tokens between two states that the prefix cache keeps; default: 512", least=1),
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
        int | None,
        doc(
            "Size of the KV cache in bytes; default: from measured free memory",
            is_common=True,
            least=1,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, doc("Fraction of device memory to use if no KV cache size is given", is_common=True)
    ] = 0.92
    num_gpu_blocks_override: Annotated[
        int | None, doc("Exact number of KV blocks, for tests", least=1)
    ] = None
    enable_prefix_caching: Annotated[
        bool, doc("Reuse KV blocks of requests that begin with the same tokens")
    ] = True
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "sha256_cbor"], doc("Hash algorithm for cached blocks")
    ] = "sha256"
    # scheduling
    max_num_batched_tokens: Annotated[
        int | None,
        doc(
            "Maximum tokens computed in one step; default: the platform's", is_common=True, least=1
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        doc(
            "Maximum number of requests running at once; default: the platform's",
            is_common=True,
            least=1,
        ),
    ] = None
    enable_chunked_prefill: Annotated[bool, doc("Compute long prompts in chunks")] = True
    max_num_partial_prefills: Annotated[
        int, doc("Maximum number of prompts computed in chunks at the same time", least=1)
    ] = 1
    max_long_partial_prefills: Annotated[
        int, doc("How many of those may be longer than long_prefill_token_threshold", least=1)
    ] = 1
    long_prefill_token_threshold: Annotated[
        int, doc("Maximum number of tokens of one prompt per step; 0 = no limit")
    ] = 0
    target_itl_ms: Annotated[
        float | None,
        doc(
            "Target for the milliseconds between two tokens: prefill chunks are made small "
            "enough; default: none",
            needs="enable_chunked_prefill",
        ),
    ] = None
    scheduling_policy: Annotated[str | None, doc("Scheduling policy plugin; default: fcfs")] = None
    max_in_flight: Annotated[
        int | None,
        doc(
            "Steps submitted before the engine waits for the oldest; 1 = synchronous; default: "
            "the platform's",
            least=1,
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        int | None,
        doc(
            "How many completions may wait before more are refused (503); default: 8192 in a "
            "server, else no limit",
            least=1,
        ),
    ] = None
    # execution
    device: Annotated[
        str, doc("Platform plugin; auto = the one whose probe succeeds", is_common=True)
    ] = "auto"
    num_threads: Annotated[
        int | None,
        doc(
            "Number of compute threads; default: OMP_NUM_THREADS, or one per core",
            is_common=True,
            least=1,
        ),
    ] = None
    distributed_executor_backend: Annotated[
        str | None, doc("Executor plugin; default: uni, or mp for several ranks")
    ] = None
    tensor_parallel_size: Annotated[
        int, doc("Number of ranks that each layer is split over", least=1)
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        doc(
            "Divide experts among the ranks of all engines (tensor_parallel_size times "
            "data_parallel_size): each holds some of them, instead of a share of every one"
        ),
    ] = False
    expert_placement_strategy: Annotated[
        Literal["linear", "round_robin"],
        doc("Experts of a rank: neighbors, or every n-th", needs="enable_expert_parallel"),
    ] = "linear"
    enable_eplb: Annotated[
        bool,
        doc(
            "Move experts between ranks while they serve, so that all ranks compute equally much",
            needs="enable_expert_parallel",
        ),
    ] = False
    all2all_backend: Annotated[
        str,
        doc(
            "How engines that share out experts exchange rows: allgather_reducescatter or naive, "
            "which both mean that all ranks get all rows and add up their results",
            needs="enable_expert_parallel",
        ),
    ] = "allgather_reducescatter"
    eplb_config: Annotated[
        dict[str, Any],
        doc(
            "How experts move (JSON): step_interval, window_size (steps whose tokens are counted), "
            "num_redundant_experts, log_balancedness",
            needs="enable_eplb",
        ),
    ] = {}
    pipeline_parallel_size: Annotated[
        int, doc("Number of pipeline stages that the layers are split into", least=1)
    ] = 1
    decode_context_parallel_size: Annotated[
        int,
        doc(
            "Number of ranks that share out the tokens of the KV cache, among those of "
            "tensor_parallel_size that hold the same KV head",
            least=1,
        ),
    ] = 1
    prefill_context_parallel_size: Annotated[
        int,
        doc("Number of ranks that share out the rows of a step and the KV cache", least=1),
    ] = 1
    cp_kv_cache_interleave_size: Annotated[
        int,
        doc(
            "Number of consecutive tokens on one of the ranks that share out the KV cache", least=1
        ),
    ] = 1
    nnodes: Annotated[
        int, doc("Number of hosts that the ranks are on, equally many on each", least=1)
    ] = 1
    node_rank: Annotated[
        int, doc("Number of this host; the engine and the server are on host 0", least=0)
    ] = 0
    master_addr: Annotated[
        str, doc("Address of host 0, where its engine waits for the other hosts")
    ] = "127.0.0.1"
    master_port: Annotated[
        int,
        doc("Port for that; the ranks meet at the next one", least=1),
    ] = 29501
    data_parallel_size: Annotated[
        int,
        doc(
            "Number of engines that requests are spread over, on all hosts", is_common=True, least=1
        ),
    ] = 1
    data_parallel_size_local: Annotated[
        int | None, doc("How many of them run on this host; default: all", least=0)
    ] = None
    data_parallel_start_rank: Annotated[
        int | None,
        doc("Number of the first engine of this host (headless, or hybrid balancing)", least=0),
    ] = None
    data_parallel_rank: Annotated[
        int | None, doc("Number of the only engine of this server (external balancing)", least=0)
    ] = None
    data_parallel_launcher: Annotated[
        str | None,
        doc(
            "Executor plugin that starts engines on other hosts; default: somebody starts them, "
            "with --headless"
        ),
    ] = None
    enable_elastic_ep: Annotated[
        bool, doc("Let scale_elastic_ep change the number of engines while they serve")
    ] = False
    data_parallel_address: Annotated[
        str | None, doc("Address of the server's host, which the hosts of other engines connect to")
    ] = None
    data_parallel_rpc_port: Annotated[int, doc("Port for that", least=1)] = 29550
    data_parallel_hybrid_lb: Annotated[
        bool, doc("Run and balance only the engines of this host; a router balances the hosts")
    ] = False
    data_parallel_external_lb: Annotated[
        bool, doc("Run one engine, data_parallel_rank; a router balances the servers")
    ] = False
    attention_backend: Annotated[
        str | None, doc("Attention plugin; default: the best one that can run the model")
    ] = None
    sampler: Annotated[str | None, doc("Sampler plugin")] = None
    enable_sleep_mode: Annotated[
        bool, doc("Allow sleep levels 1 and 2, which release the memory of an idle engine")
    ] = False
    enable_prompt_embeds: Annotated[bool, doc("Accept prompts that are embeddings")] = False
    interleave_mm_strings: Annotated[
        bool, doc("Keep images between the texts of a message also in chat templates for text")
    ] = False
    default_mm_loras: Annotated[
        dict[str, str],
        doc('Adapters for prompts with a modality (JSON): {"audio": FOLDER}', needs="max_loras"),
    ] = {}
    enable_mm_embeds: Annotated[
        bool, doc("Accept the rows of images, audio and video in place of the items")
    ] = False
    # images, audio and video
    limit_mm_per_prompt: Annotated[
        dict[str, Any],
        doc('Most items of a modality in a prompt (JSON): {"image": 4}; default: 999 of each'),
    ] = {}
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, doc("Options of the model's processor of images and audio (JSON)")
    ] = None
    media_io_kwargs: Annotated[
        dict[str, Any], doc('How files are decoded, by modality (JSON): {"video": {…}}')
    ] = {}
    mm_processor_cache_gb: Annotated[
        float, doc("GiB for processed items, which are not processed again; 0 = none", least=0)
    ] = 4.0
    allowed_local_media_path: Annotated[
        str | None, doc("Folder below which requests may name files; default: none")
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None, doc("Hosts of URLs in requests; default: all that are public")
    ] = None
    max_num_encoder_input_tokens: Annotated[
        int | None,
        doc(
            "Rows of images, audio and video that a step encodes; default: max_num_batched_tokens",
            least=1,
        ),
    ] = None
    encoder_cache_size: Annotated[
        int, doc("How many such rows are kept for later prompts and chunks", least=1)
    ] = 4096
    disable_chunked_mm_input: Annotated[
        bool, doc("Compute all tokens of an image, audio or video in one step")
    ] = False
    worker_extension_cls: Annotated[
        str | None, doc("Class whose methods collective_rpc may call: module:Class")
    ] = None
    enforce_eager: Annotated[bool, doc("Do not record and replay the forward", is_common=True)] = (
        False
    )
    recording_mode: Annotated[
        RecordingMode | None,
        doc(
            "Which steps are recorded: full = all; full_decode_only = those without prompts; "
            "piecewise = all, without their attention; full_and_piecewise = steps without prompts "
            "whole, others without their attention. Default: full_and_piecewise on devices that "
            "can record so, else full"
        ),
    ] = None
    cpu_offload_gb: Annotated[
        float,
        doc(
            "GiB of each rank's weights that stay in the host's memory, where a GPU reads them",
            least=0,
        ),
    ] = 0.0
    batch_invariant: Annotated[
        bool,
        doc("Results have the same bits in every batch; needs plugins that can, and is slower"),
    ] = False
    logits_processors: Annotated[
        list[str] | None, doc("Logits processor plugins or classes (module:Class), in order")
    ] = None
    runner: Annotated[
        Literal["auto", "generate", "pooling"], doc("Make text or vectors; auto = as the model")
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "vllm", "transformers"],
        doc("Whose code the model runs: auto = its own, else transformers'; vllm = only its own"),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"],
        doc("What a model of text makes instead of text; auto = as its files say"),
    ] = "auto"
    pooler: Annotated[str | None, doc("Pooler plugin")] = None
    io_processor_plugin: Annotated[
        str | None, doc("IO processor plugin: makes prompts of any data for a model that pools")
    ] = None
    pooler_config: Annotated[
        dict[str, Any] | None, doc("How vectors are made: pooling_type, use_activation (JSON)")
    ] = None
    # speculative decoding, structured output, LoRA, connectors: chosen plugins and their limits
    spec_method: Annotated[
        str | None,
        doc("Draft plugin for speculative decoding; default: one for the model of spec_model"),
    ] = None
    spec_tokens: Annotated[
        int,
        doc(
            "Maximum number of draft tokens per step and request; 0 = what the draft model was "
            "made for",
            least=0,
            needs=DRAFTS,
        ),
    ] = 0
    spec_model: Annotated[str | None, doc("Checkpoint of the draft model, as model")] = None
    spec_revision: Annotated[
        str | None, doc("Revision of the draft model, as revision", needs="spec_model")
    ] = None
    spec_quantization: Annotated[
        str | None, doc("Quantization of the draft model, as quantization", needs="spec_model")
    ] = None
    spec_adaptive: Annotated[
        bool, doc("Verify fewer draft tokens where they are seldom right", needs=DRAFTS)
    ] = True
    spec_max_rows: Annotated[
        int | None,
        doc("No drafts in steps with more requests; default: no limit", least=1, needs=DRAFTS),
    ] = None
    spec_max_model_len: Annotated[
        int | None,
        doc("No drafts after this length; default: the draft model's limit", least=1, needs=DRAFTS),
    ] = None
    spec_tensor_parallel_size: Annotated[
        int | None,
        doc(
            "1 = each rank holds the whole draft model; default: tensor_parallel_size",
            least=1,
            needs=DRAFTS,
        ),
    ] = None
    spec_enforce_eager: Annotated[
        bool, doc("Do not record and replay the draft model's forward", needs=DRAFTS)
    ] = False
    spec_disable_padded_drafter_batch: Annotated[
        bool,
        doc("On a GPU, wait for the tokens of each step before drafts are computed", needs=DRAFTS),
    ] = False
    structured_outputs_config: Annotated[
        dict[str, Any],
        doc(
            "Structured output (JSON): backend (auto, a plugin or a list of plugins in order), "
            "disable_fallback, disable_any_whitespace, disable_additional_properties, "
            "enable_in_reasoning",
            is_common=True,
        ),
    ] = {}
    max_loras: Annotated[
        int, doc("Maximum number of different adapters in one step; 0 = LoRA off", least=0)
    ] = 0
    max_lora_rank: Annotated[int, doc("Largest adapter rank", needs="max_loras", least=1)] = 16
    max_cpu_loras: Annotated[
        int | None, doc("Number of adapters kept in memory; default: max_loras", needs="max_loras")
    ] = None
    lora_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        doc(
            "Type of adapters; auto = dtype, or the platform's choice if dtype is auto too (see "
            "docs/lora.md)",
            needs="max_loras",
        ),
    ] = "auto"
    fully_sharded_loras: Annotated[
        bool,
        doc("Divide both matrices of an adapter among ranks, not only one", needs="max_loras"),
    ] = False
    weight_transfer: Annotated[
        str | None,
        doc("Weight transfer plugin: brings new weights from a trainer in another process"),
    ] = None
    encoder_connector: Annotated[
        str | None,
        doc("Encoder connector plugin: shares rows of images, audio and video with other engines"),
    ] = None
    mm_encoder_only: Annotated[
        bool,
        doc(
            "Load what encodes images, audio and video, and one layer of the language model: for "
            "an engine that only makes rows for others. Its answers mean nothing",
            needs="encoder_connector",
        ),
    ] = False
    kv_connectors: Annotated[list[str] | None, doc("KV connector plugins, in order")] = None
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"], doc("What to do when a KV load fails", needs="kv_connectors")
    ] = "recompute"
    # output
    tool_call_parser: Annotated[
        str,
        doc(
            "Tool parser plugin; auto = what the model family says, none = no parser",
            is_common=True,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        doc(
            "Reasoning parser plugin; auto = what the model family recommends, none = no parser",
            is_common=True,
        ),
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
        float,
        doc("Fraction of the KV blocks that kv_cache_metrics watches", needs="kv_cache_metrics"),
    ] = 0.01
    stream_interval: Annotated[
        int, doc("Number of tokens gathered before a chunk is streamed", least=1)
    ] = 1

    def __post_init__(self) -> None:
        quantization = quantization_for(self.load_format, self.quantization)
        msgspec.structs.force_setattr(self, "quantization", quantization)
        for name in ("attention_backend", "dtype", "kv_cache_dtype", "load_format"):
            msgspec.structs.force_setattr(self, name, our_name(name, getattr(self, name)))

    @property
    def num_ranks(self) -> int:
        """Ranks that the model is divided among."""
        return self.ranks_of_stage * self.pipeline_parallel_size

    @property
    def expert_engines(self) -> int:
        """Engines whose ranks share out whole experts. They compute every step together."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def ranks_of_stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size


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


class EPLBConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `EngineConfig.eplb_config`.

    window_size: the steps whose tokens are counted. step_interval: the steps after which experts
    move. num_redundant_experts: how many experts of each layer have another copy. log_balancedness:
    log how equal the loads of the ranks were, and will be, when experts move. use_async, policy:
    only their defaults are known.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False
    use_async: bool = False
    policy: str = "default"


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which plugins may be used, which ambient plugins are on, and the plugins' options by
    "kind.name"."""

    allow: Annotated[
        list[str] | None,
        doc(
            "Use only these distributions or kind:name; default: everything installed",
            is_common=True,
        ),
    ] = None
    deny: Annotated[
        list[str], doc("Never use these distributions or kind:name", is_common=True)
    ] = []
    override: Annotated[
        list[str], doc("Distributions whose plugins may replace those of another distribution")
    ] = []
    enable: Annotated[
        list[str],
        doc("Ambient plugins to run in addition to the defaults, kind:name", is_common=True),
    ] = []
    disable: Annotated[
        list[str], doc("Default ambient plugins that should not run, kind:name", is_common=True)
    ] = []
    files: Annotated[
        list[str],
        doc(
            "Python files with a plugin that is not installed, for development: FILE.py",
            flag="plugin",
        ),
    ] = []
    reload: Annotated[
        bool,
        doc("For development: read the code of parsers and logits processors when it changes"),
    ] = False
    lock: Annotated[
        str | None,
        doc("Lock file (pegboard plugins lock): refuse to start with other plugins or versions"),
    ] = None
    options: Annotated[dict[str, dict[str, Any]], doc("Plugin options by kind.name")] = {}


@dataclass(frozen=True)
class Settings:
    """All settings of a program. sections: name → the settings of a section that another
    distribution brings. sources: field name → where its value came from ("command line", a file, a
    plugin, …). A field that is not in it has its default."""

    engine: EngineConfig = EngineConfig()
    plugins: PluginConfig = PluginConfig()
    sections: Mapping[str, msgspec.Struct] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def section(self, cls: type[Section]) -> Section:
        """Return the settings of the section that is declared by `cls`, or its defaults."""
        return next(
            (section for section in self.sections.values() if isinstance(section, cls)), cls()
        )

    def with_engine(self, source: str, **values: Any) -> "Settings":
        """Return a copy with some engine values replaced. `source` is recorded as the source of
        each of them."""
        engine = build(EngineConfig, {**msgspec.structs.asdict(self.engine), **values}, source)
        sources = {**self.sources, **dict.fromkeys(values, source)}
        return replace(self, engine=engine, sources=sources)


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


def eplb_config(config: EngineConfig) -> EPLBConfig | None:
    """Check the settings of moving experts. Return None if experts stay. Raises ConfigError."""
    checked: EPLBConfig = build(EPLBConfig, config.eplb_config, "eplb_config")
    for name, least in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
        if (value := getattr(checked, name)) < least:
            raise ConfigError(f"eplb_config: {name} must be at least {least}, got {value}")
    if checked.use_async:
        raise ConfigError(
            "eplb_config: use_async must be false: experts move between two steps, and not while "
            "one is computed"
        )
    if checked.policy != "default":
        raise ConfigError(f"eplb_config: policy must be 'default', got {checked.policy!r}")
    if not config.enable_eplb:
        return None
    if config.tensor_parallel_size == 1:
        raise ConfigError(
            "enable_eplb needs a tensor_parallel_size of at least 2, so that experts can move from "
            "rank to rank"
        )
    if config.max_loras:
        raise ConfigError(
            "enable_eplb cannot be used with LoRA, because adapters of experts do not move; remove "
            "one of them"
        )
    if checked.num_redundant_experts and config.expert_placement_strategy != "linear":
        raise ConfigError(
            "eplb_config: num_redundant_experts needs expert_placement_strategy 'linear', got "
            f"{config.expert_placement_strategy!r}"
        )
    return checked


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError for values that cannot work together or are out of range, before anything
    is loaded."""
    check("engine", config)
    if isinstance(length := config.max_model_len, int) and length < 1 and length != -1:  # AUTO_LEN
        raise ConfigError(f"max_model_len must be at least 1, got {length}")
    if config.dtype not in DTYPES:
        raise ConfigError(
            f"dtype {config.dtype!r} is unknown{did_you_mean(config.dtype, DTYPES)}; expected "
            f"{', '.join(DTYPES)}"
        )
    last = config.data_parallel_rank
    if last is None:
        last = (config.data_parallel_start_rank or 0) + (config.data_parallel_size_local or 1) - 1
    if last >= config.data_parallel_size:
        raise ConfigError(
            f"data_parallel_size is {config.data_parallel_size}, so there is no engine {last}; it "
            "counts the engines of all hosts"
        )
    if config.target_itl_ms is not None and not config.target_itl_ms > 0:
        raise ConfigError(f"target_itl_ms must be above 0, got {config.target_itl_ms}")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization must be in (0, 1], got {config.gpu_memory_utilization}"
        )
    if config.max_long_partial_prefills > config.max_num_partial_prefills:
        raise ConfigError("max_long_partial_prefills must not exceed max_num_partial_prefills")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"max_cpu_loras={config.max_cpu_loras} must be at least max_loras={config.max_loras}"
        )
    structured_outputs_config(config)
    eplb_config(config)
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

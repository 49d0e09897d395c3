"""Fills in what the user left open with what the chosen platform and its kernels prefer. Imports
torch."""

from __future__ import annotations

import msgspec

from pegboard.config.data_parallel import local_engines
from pegboard.config.schema import EngineConfig, check_engine
from pegboard.errors import ConfigError
from pegboard.interfaces.platform import PlatformSetup
from pegboard.interfaces.spec import Need
from pegboard.plan.engine_plan import EnginePlan
from pegboard.plugins.registry import Registry

WHOLE_PROMPTS_TOKENS = 4096
"""The default size of steps that consist of whole prompts. No other request waits for a token
meanwhile, and large steps make faster products: encoders took 20 % less time than with 512."""


def with_platform_defaults(registry: Registry, plan: EnginePlan) -> EngineConfig:
    """Return the engine's settings with the platform's value for every "auto". A value that the
    user set stays."""
    settings = plan.settings
    entry = registry.choose("platform", Need(), explicit=settings.engine.device).require()
    # ranks of other hosts count too: a default may be too small, but never too large
    local_ranks = settings.engine.num_ranks * local_engines(settings.engine)
    platform = registry.build(entry, PlatformSetup(settings.engine.num_threads, local_ranks))
    open_settings = {
        name
        for name, value in msgspec.structs.asdict(settings.engine).items()
        if value in (None, "auto")
    }
    if "gpu_memory_utilization" in settings.sources:
        open_settings.discard("kv_cache_memory_bytes")
    if not settings.engine.max_loras or "dtype" not in open_settings:
        open_settings.discard("lora_dtype")  # that of the model, if the user chose it
    filled = {
        name: value
        for name, value in platform.defaults(plan.checkpoint.dtype).items()
        if name in open_settings
    }
    if not settings.engine.enable_chunked_prefill and "max_num_batched_tokens" in filled:
        least = max(plan.max_model_len, WHOLE_PROMPTS_TOKENS if plan.pooling is not None else 0)
        filled["max_num_batched_tokens"] = max(int(str(filled["max_num_batched_tokens"])), least)
    if settings.engine.max_num_batched_tokens is not None and "max_num_seqs" in filled:
        filled["max_num_seqs"] = min(
            int(str(filled["max_num_seqs"])), settings.engine.max_num_batched_tokens
        )
    config = settings.with_engine(f"platform {entry.name}", **filled).engine
    config = msgspec.structs.replace(config, device=entry.name)
    check_engine(config)
    unset = [
        name
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")
        if getattr(config, name) is None
    ]
    if unset or config.dtype == "auto":
        raise ConfigError(
            f"platform {entry.name} gives no default for {', '.join([*unset, 'dtype'])}; set them"
        )
    return config

"""What determines the content of KV blocks, as a digest and in words."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from pegboard.config.schema import EngineConfig
from pegboard.interfaces.attention import KVPlan
from pegboard.plan.engine_plan import EnginePlan

SETTINGS = (
    "dtype",
    "quantization",
    "spec_quantization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "cp_kv_cache_interleave_size",
    "spec_tensor_parallel_size",
    "prefix_caching_hash_algo",
)
"""The settings of which blocks depend, or their names do."""
_DIGEST = re.compile("([0-9a-f]{16})[0-9a-f]{16,}")


def identified(
    kv_plan: KVPlan, plan: EnginePlan, config: EngineConfig, layouts: Sequence[str]
) -> KVPlan:
    """Return the plan of the KV cache with its identity and its facts (see KVPlan). layouts: what
    the attention backend of each pipeline stage says about its memory. A checkpoint without a
    digest never has the same identity twice."""
    facts: dict[str, Any] = {}
    sources = {"checkpoint": plan.checkpoint}
    if plan.draft is not None:
        sources["draft checkpoint"] = plan.draft.checkpoint
    for role, checkpoint in sources.items():
        digest = checkpoint.digest or f"without a digest, number {os.urandom(16).hex()}"
        facts[role] = (*checkpoint.architectures, digest)
        about = (checkpoint.config, checkpoint.rope_style, checkpoint.quantization)
        facts[f"config of the {role}"] = _digest(about)
    facts |= {name: getattr(config, name) for name in SETTINGS}
    groups = kv_plan.groups
    facts["kv_cache_dtype"] = sorted(
        {tensor.dtype for group in groups for tensor in group.spec.tensors}
    )
    facts["block_size"] = [group.block_size for group in groups]
    facts["tokens per hash"] = kv_plan.hash_block_size
    facts["layout"] = layouts
    texts = {name: _text(value) for name, value in facts.items()}
    return msgspec.structs.replace(kv_plan, identity=_digest([facts, groups]), facts=texts)


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted", enc_hook=repr)).hexdigest()


def _text(value: Any) -> str:
    """Return a fact as text: the equal parts of a list once, and the first digits of digests."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return _DIGEST.sub(r"\1", ", ".join(dict.fromkeys(map(str, parts))))

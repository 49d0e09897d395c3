"""Nothing is declared that nothing reads."""

from __future__ import annotations

from declarations import (
    actions,
    called_on_workers,
    fields,
    flag_words,
    flags_read,
    is_read,
    is_set,
    product_files,
    public_methods,
    strings_of,
    uses,
)
from members import CORE

UNREAD: set[str] = {
    "AttentionInputs.bidirectional", "AttentionInputs.draft_parents", "AttentionInputs.encoder_lens",
    "AttentionInputs.max_query_len", "AttentionInputs.max_seq_len", "AttentionInputs.num_decode_rows", "AttentionLayer.causal",
    "AttentionNeed.bidirectional", "AttentionNeed.tree", "Batch.dp", "Batch.known_token_ids", "BuiltinToolNeed.type",
    "CollectiveSetup.address", "CollectiveSetup.rank", "CommandSetup.word", "Drafts.probs", "EncoderConnectorSetup.model_digest",
    "ExecutorSetup.worker_plan", "ExecutorSetup.world_size", "KVCacheSpec.layout", "KVConnectorSetup.block_sizes",
    "KernelNeed.op", "KernelSpec.fuses", "KernelSpec.symbol", "Limits.grammar_timeout_s", "LoRAResolverSetup.base_model",
    "NewRequest.parent_row", "StructuredOutputNeed.text", "StructuredOutputSetup.load", "WeightLoaderSpec.weights_optional",
}  # fmt: skip
"""Fields without a reader, to be read or deleted. Only shrinks."""
UNSET: set[str] = {
    "Limits.encoder_cache_tokens", "Limits.max_encoder_tokens", "Limits.never_split_media", "Limits.num_lookahead_tokens",
    "Limits.record_kv_events", "MetricsSetup.interval_s", "ModelSourceSetup.offline", "StepOutput.nan_rows",
}  # fmt: skip
"""Fields that are read and never set, to be set or deleted. Only shrinks."""
EXCEPTIONS = {
    "EngineConfig.structured_outputs_config": "read by a function of its own file, which checks it",
    "EngineConfig.trust_remote_code": "a name of vLLM's that is always refused, in its own file",
    "ModelFamilySpec.implementation": "gives a default to the field of Spec: a family is data",
    "StepTimes.prepare_s": "a part of StepTimes.total_s, which is read",
    "TransferReport.saved": "KV connectors fill it",
    "TransferReport.loaded": "KV connectors fill it",
    "TransferReport.failed": "KV connectors fill it",
}
"""Fields that no other file of the product reads or sets → why they stay."""
UNREAD_FLAGS: set[tuple[str, str]] = {
    ("AttentionSpec", "mixed"), ("AttentionSpec", "batch_invariant"), ("DraftSpec", "hidden_states"), ("DraftSpec", "own_kv"),
    ("KVConnectorSpec", "layerwise"), ("LogitsProcessorSpec", "argmax_invariant"), ("MetricsSpec", "kv_events"),
    ("ModelSpec", "multimodal"), ("ModelSpec", "pooling"), ("ModelSpec", "encoder_decoder"), ("ModelSpec", "draft"),
    ("ModelSpec", "eager_only"), ("SamplerSpec", "drafts"),
}  # fmt: skip
"""(spec, flag) that nothing looks for. Only shrinks."""
UNCALLED_METHODS: set[str] = {"memory"}
"""Methods of the worker that nothing calls. Only shrinks."""
MISSING_METHODS: set[str] = {"sleep", "wake", "reload_weights"}
"""Methods that the engine calls on workers, which they do not have. Only shrinks."""
UNASKED_ACTIONS: set[str] = {"stats", "block_usage", "kv_events", "pin_lora", "call", "sleep", "reload_weights"}
"""Control actions that no product code asks for. Only shrinks."""


def check(what: str, found: set[str] | set[tuple[str, str]], known: set[str] | set[tuple[str, str]]) -> None:
    """Exactly the known ones: a new one is an error, and so is an entry of the list that is gone."""
    more, gone = sorted(map(str, found - known)), sorted(map(str, known - found))  # type: ignore[operator]
    assert not more, f"{what}: {', '.join(more)}"
    assert not gone, f"no longer so, remove from the list: {', '.join(gone)}"


def test_every_field_is_read() -> None:
    unread = {str(field) for field in fields() if not is_read(field)}
    check("declared and read by no other file", unread - set(EXCEPTIONS), UNREAD)


def test_every_field_with_a_default_is_set() -> None:
    """Settings are set by users, specs by plugins, and the fields of a need are checked above."""
    optional = [field for field in fields() if field.has_default and not field.owner.endswith(("Spec", "Config", "Need"))]
    unset = {str(field) for field in optional if is_read(field) and not is_set(field)}
    check("read and never set", unset - set(EXCEPTIONS), UNSET)


def test_exceptions_are_needed() -> None:
    idle = {str(field) for field in fields() if not is_read(field) or not is_set(field)}
    assert set(EXCEPTIONS) <= idle, set(EXCEPTIONS) - idle


def test_every_flag_is_looked_for() -> None:
    check("flags that nothing looks for", {pair for pair in flag_words() if pair[1] not in flags_read()}, UNREAD_FLAGS)


def test_every_method_of_the_worker_is_called() -> None:
    own = CORE / "worker/worker.py"
    callers = [path for path in product_files() if path != own and ("executor" in str(path) or "/engine/" in str(path))]
    called = {name for path in callers for name in uses(path).read | strings_of(path)}
    check("never called", set(public_methods(own, "Worker")) - called, UNCALLED_METHODS)


def test_what_is_called_on_workers_is_there() -> None:
    methods = set(public_methods(CORE / "worker/worker.py", "Worker"))
    check("no method of the worker", set(called_on_workers()) - methods, MISSING_METHODS)


def test_every_control_action_is_asked_for() -> None:
    found = list(actions())
    assert found, "where are the engine's actions? (a dict whose name has `actions` in it)"
    asked = {name for path in product_files() if CORE / "engine" not in path.parents for name in strings_of(path)}
    check("control actions that nothing asks for", set(found) - asked, UNASKED_ACTIONS)


def test_something_is_looked_at() -> None:
    """The search finds what there is."""
    assert len(fields()) > 300
    names = {str(field) for field in fields()}
    assert {"Spec.tier", "Limits.max_num_seqs", "Batch.rows", "ServerConfig.port", "AttentionSetup.layers"} <= names
    assert sum(is_read(field) for field in fields()) > 250

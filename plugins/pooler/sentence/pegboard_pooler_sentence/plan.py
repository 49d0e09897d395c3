"""What a model makes of prompts, as its config and the files of sentence-transformers next to it
declare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from pegboard.data.pooling_params import TOKEN_TASKS, Pooling, Task
from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.pooler import PoolerFacts
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_pooler_sentence.classes import (
    class_activation,
    class_tokens,
    head_of,
    is_difference,
    labels,
    stored_head,
)
from pegboard_pooler_sentence.modules import (
    Steps,
    read_steps,
    sentence_length,
    sentence_prompts,
)

OF_TOKENS = ("ALL", "STEP")
OF_EVERY_TOKEN = ("MEAN", "MEAN_SQRT", "MAX")
KEEPS_NOTHING = "LAST"
"""The only way to make a vector of a prompt that needs no states of the steps before."""
TOKENS = "ForTokenClassification"
REWARDS = "ForRewardModel"
STEPS = "ForProcessRewardModel"
"""How the names of architectures end whose heads are for each token. Rewards stay as they are."""
BOTH_WAYS = "Bidirectional"
"""In the names of NVIDIA's decoders whose tokens attend to all of the prompt."""
BOTH_WAYS_POOLINGS = {"avg": "MEAN", "cls": "CLS", "last": "LAST"}
"""How their configs name ways to pool."""
CLASSIFIER_POOLINGS = {"": "", "cls": "CLS", "bos": "CLS", "mean": "MEAN"}
"""How configs name the states of which a head for classes computes; "" = the config names none."""
INSTRUCTED = "GritLM"
"""The architecture that generates text as a decoder does. For vectors, its tokens attend to all of
the prompt, and means leave out the instruction."""
SPLADE = "SpladeSparseEmbeddingModel"
WORDS = ("ForMaskedLM", SPLADE)
"""How the names of architectures end whose logits are those of words under a mask."""


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The setting `pooler_config`. The names are vLLM's.

    pooling_type: the final hidden state that becomes the vector: of the LAST token, of the first
    one (CLS), or the MEAN (MEAN_SQRT: the sum divided by the root of the length) or MAX of all.
    ALL: requests that name no task get a result for each token; STEP: for the tokens step_tag_id.
    seq_pooling_type, tok_pooling_type: the same, for the two kinds of tasks. use_activation,
    dimensions, step_tag_id, returned_token_ids: the default of requests that do not set it.
    logit_mean, logit_sigma: subtracted from the values of classes, and what they are then divided
    by; logit_bias: another name of logit_mean. task: of requests that name none. With
    enable_chunked_processing, servers take texts of up to max_embed_len tokens for `embed`.
    """

    pooling_type: Literal["LAST", "CLS", "MEAN", "MEAN_SQRT", "MAX", "ALL", "STEP"] | None = None
    seq_pooling_type: Literal["LAST", "CLS", "MEAN", "MEAN_SQRT", "MAX"] | None = None
    tok_pooling_type: Literal["ALL", "STEP"] | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    logit_bias: float | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    task: Task | None = None
    enable_chunked_processing: bool | None = None
    max_embed_len: int | None = None


@dataclass(frozen=True)
class Declared:
    """What the files say. steps: after the transformer. activation: what is applied to the result,
    unless a request has use_activation=False. is_of_tokens: a request that names no task gets a
    result for each token. token_pooling: of which tokens (see `PoolerConfig`)."""

    task: Literal["embed", "classify"] = "embed"
    steps: Steps = Steps(("LAST",))
    activation: str = "normalize"
    use_activation: bool = True
    is_of_tokens: bool = False
    token_pooling: str = "ALL"


def plan(facts: PoolerFacts) -> Pooling:
    """See `PoolerSpec.plan`."""
    chosen = read_config(facts.config)
    declared = with_choices(declared_of(facts), chosen)
    config = facts.checkpoint.config
    is_classifier = declared.task == "classify"
    converts = facts.convert == "classify"
    tokens = class_tokens(config) if converts else ()
    columns = None
    if converts and not tokens and stored_head(facts.checkpoint) is None:
        columns = chosen.returned_token_ids
    names = labels(config)
    method = method_of(declared, chosen)
    if is_instructed(facts) and "MEAN" in declared.steps.pooling_types:
        check_whole(chosen)
        method["instructed"] = "yes"
    if tokens:
        is_two_way = is_difference(config, tokens)
        names = tokens[-1:] if is_two_way else tokens
        method["tokens"] = json.dumps(tokens)
        method["subtracts"] = "yes" if is_two_way else ""
        if len(names) == 1:
            method["activation"] = "sigmoid"
    elif columns:
        names = tuple(f"LABEL_{token_id}" for token_id in columns)
        method["token_ids"] = method.pop("returned_token_ids")
        method["activation"] = "softmax"
    check_choices(chosen, (len(names) if columns is None else None) if is_classifier else 0)
    token_task: Task = "token_classify" if is_classifier else "token_embed"
    default: Task = token_task if declared.is_of_tokens else declared.task
    both_ways = facts.sees_all
    if is_instructed(facts):
        check_window(facts.checkpoint)
        both_ways = True
    whole = both_ways or "encoder" in facts.flags
    types = declared.steps.pooling_types
    tasks = tasks_of(facts.flags, declared, token_task)
    default = chosen.task or default
    if default not in tasks:
        raise ConfigError(
            f"pooler_config: this model does {' and '.join(tasks)}, and not {default}"
        )
    prompts, prompt_name = ({}, None) if is_classifier else sentence_prompts(facts.checkpoint)
    check_prompts(facts.checkpoint, declared.steps, prompts)
    head: tuple[str, ...] | None = None
    if converts and not (tokens or columns):
        head = head_of(facts.checkpoint)
    elif not is_classifier and not declared.steps.words:
        head = ()
    keeps = [] if types == (KEEPS_NOTHING,) else [declared.task]
    return Pooling(
        task=default,
        tasks=tuple(task for task in tasks if task != default),
        labels=names if is_classifier else (),
        whole_prompts=whole,
        sees_all=both_ways,
        from_start=()
        if whole
        else tuple(task for task in tasks if task in TOKEN_TASKS or task in keeps),
        has_steps=method["token_pooling"] == "STEP",
        max_length=sentence_length(facts.checkpoint),
        max_embed_len=chosen.max_embed_len,
        prompts=prompts,
        prompt_name=prompt_name,
        use_activation=declared.use_activation,
        dimensions=None if is_classifier else dimensions_of(config),
        head=head,
        method=method,
    )


def check_prompts(checkpoint: Checkpoint, steps: Steps, prompts: Mapping[str, str]) -> None:
    """Raise ModelError if the tokens of a prompt would change a vector that the files say is not of
    them."""
    types = [name for name in steps.pooling_types if name in OF_EVERY_TOKEN]
    if steps.leaves_out_prompts and types and any(prompts.values()):
        raise ModelError(
            f"{checkpoint.path}: the step Pooling has include_prompt=false: {types[0]} is to leave "
            "out the tokens of prompts, which is not supported; to count them, too, set "
            f'pooler_config to {{"pooling_type": "{types[0]}"}}'
        )


def is_instructed(facts: PoolerFacts) -> bool:
    """Return whether the config names GritLM, whatever code computes it, and vectors are wanted."""
    names = facts.checkpoint.config.get("architectures")
    return facts.convert == "embed" and names == [INSTRUCTED]


def check_window(checkpoint: Checkpoint) -> None:
    """Raise ModelError if other code computes GritLM, which would keep the window."""
    name = checkpoint.architectures[0]
    if name != INSTRUCTED and checkpoint.config.get("sliding_window"):
        raise ModelError(
            f"{checkpoint.path}: vectors of {INSTRUCTED} have no window, and {name} would use the "
            "config's sliding_window; set it to null with hf_overrides, or model_impl to 'auto'"
        )


def tasks_of(flags: frozenset[str], declared: Declared, token_task: Task) -> list[Task]:
    """Return what requests may ask for."""
    if "token_classifier" in flags or not declared.steps.pooling_types:
        return [token_task]
    if "classifier" in flags or declared.steps.words:
        return [declared.task]  # the head is for one state of a prompt
    return [declared.task, token_task]


def read_config(given: Mapping[str, Any]) -> PoolerConfig:
    try:
        chosen = msgspec.convert(dict(given), PoolerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"pooler_config: {error}") from error
    if chosen.logit_bias is not None and chosen.logit_mean is not None:
        raise ConfigError("pooler_config: logit_bias is another name of logit_mean; give one")
    if chosen.logit_sigma == 0:
        raise ConfigError("pooler_config: logit_sigma must not be 0")
    if (chosen.max_embed_len is not None) != bool(chosen.enable_chunked_processing):
        raise ConfigError(
            "pooler_config: enable_chunked_processing needs max_embed_len, the most tokens of a "
            "text, and max_embed_len has no effect without it"
        )
    if chosen.max_embed_len is not None and chosen.max_embed_len < 1:
        raise ConfigError("pooler_config: max_embed_len must be at least 1")
    return chosen


def check_whole(chosen: PoolerConfig) -> None:
    """Raise ConfigError if texts are to be divided, of which only the first part would have the
    instruction."""
    if chosen.max_embed_len is not None:
        raise ConfigError(
            f"pooler_config: {INSTRUCTED} leaves out the instruction of a text, so texts cannot be "
            "divided; leave enable_chunked_processing and max_embed_len out"
        )


def check_choices(chosen: PoolerConfig, num_classes: int | None) -> None:
    """Raise ConfigError for values that do not fit what the model makes. num_classes: 0 = it makes
    vectors; None = any token can be a class."""
    if chosen.dimensions is not None and (num_classes != 0 or chosen.dimensions < 1):
        raise ConfigError(
            f"pooler_config: dimensions={chosen.dimensions}; expected at least 1, and a model that "
            "makes vectors"
        )
    ids = chosen.returned_token_ids or []
    if ids and num_classes is not None and not 0 <= min(ids) <= max(ids) < num_classes:
        raise ConfigError(
            f"pooler_config: returned_token_ids={ids}, and the model has {num_classes} classes"
        )


def with_choices(declared: Declared, chosen: PoolerConfig) -> Declared:
    """Return what the files say, with what the user has set instead."""
    one = chosen.pooling_type
    whole = chosen.seq_pooling_type or (None if one in OF_TOKENS else one)
    of_tokens = chosen.tok_pooling_type or (one if one in OF_TOKENS else None)
    if whole is not None:
        if declared.steps.words and whole != "MAX":
            raise ConfigError(
                f"pooler_config: pooling_type is {whole!r}; this model pools logits, by 'MAX'"
            )
        declared = replace(
            declared,
            steps=replace(declared.steps, pooling_types=(whole,), leaves_out_prompts=False),
            is_of_tokens=False,
        )
    if of_tokens is not None:
        declared = replace(
            declared, token_pooling=of_tokens, is_of_tokens=declared.is_of_tokens or whole is None
        )
    if chosen.use_activation is not None:
        declared = replace(declared, use_activation=chosen.use_activation)
    return declared


def method_of(declared: Declared, chosen: PoolerConfig) -> dict[str, str]:
    """Return what the pooler needs to know."""
    method = {
        "pooling_types": ",".join(declared.steps.pooling_types),
        "token_pooling": declared.token_pooling,
        "activation": declared.activation,
    }
    if declared.steps.words:
        method["words"] = declared.steps.words
    if declared.steps.dense:
        method["dense"] = json.dumps(declared.steps.dense)
    mean = chosen.logit_bias if chosen.logit_mean is None else chosen.logit_mean
    for name, value in (
        ("logit_mean", mean),
        ("logit_sigma", chosen.logit_sigma),
        ("dimensions", chosen.dimensions),
        ("step_tag_id", chosen.step_tag_id),
        ("returned_token_ids", chosen.returned_token_ids),
    ):
        if value is not None:
            method[name] = json.dumps(value)
    return method


def dimensions_of(config: Mapping[str, Any]) -> tuple[int, ...] | int | None:
    """Return to how many values a vector may be cut: a config has `is_matryoshka`, or lists
    `matryoshka_dimensions`. They can be set with hf_overrides. Raises ModelError for a list of
    something else."""
    if listed := config.get("matryoshka_dimensions"):
        if not isinstance(listed, list) or not all(type(size) is int for size in listed):
            raise ModelError(
                f"the checkpoint's config has matryoshka_dimensions={listed!r:.80}; expected a "
                "list of whole numbers"
            )
        return tuple(listed)
    size = config.get("hidden_size")
    return size if config.get("is_matryoshka") and isinstance(size, int) else None


def name_of(checkpoint: Checkpoint) -> str:
    """Return the architecture that the config names, whatever code computes it."""
    names = checkpoint.config.get("architectures") or checkpoint.architectures
    return str(names[0])


def usual_pooling(facts: PoolerFacts) -> str:
    """Return how a model pools if no file of sentence-transformers says so."""
    if is_instructed(facts):
        return "MEAN"
    if BOTH_WAYS not in name_of(facts.checkpoint):
        return "CLS" if "encoder" in facts.flags else KEEPS_NOTHING
    named = facts.checkpoint.config.get("pooling", "avg")
    if named not in BOTH_WAYS_POOLINGS:
        raise ModelError(
            f"{facts.checkpoint.path}: pooling is {named!r:.60}; expected "
            f"{', '.join(BOTH_WAYS_POOLINGS)}"
        )
    return BOTH_WAYS_POOLINGS[named]


def declared_of(facts: PoolerFacts) -> Declared:
    """Return what the flags of the model and its files say."""
    checkpoint = facts.checkpoint
    name = name_of(checkpoint)
    default = usual_pooling(facts)
    if "classifier" in facts.flags or facts.convert == "classify":
        of_config = str(checkpoint.config.get("classifier_pooling", "")).lower()
        if of_config not in CLASSIFIER_POOLINGS:
            raise ModelError(
                f"{checkpoint.path}: classifier_pooling is {of_config!r:.60}; expected cls, bos or "
                "mean"
            )
        return Declared(
            "classify",
            Steps((CLASSIFIER_POOLINGS[of_config] or default,)),
            class_activation(checkpoint.config),
            use_activation=not name.endswith(REWARDS),
            is_of_tokens=name.endswith((TOKENS, REWARDS, STEPS))
            or "token_classifier" in facts.flags,
            token_pooling="STEP" if name.endswith(STEPS) else "ALL",
        )
    steps = read_steps(checkpoint)
    if steps is None and name.endswith(SPLADE):
        steps = Steps(("MAX",), words="relu")
    if steps is not None and steps.words and not name.endswith(WORDS):
        raise ModelError(
            f"{checkpoint.path}: the step SpladePooling needs the logits of words, and {name} has "
            f"none; expected …{WORDS[0]}"
        )
    if steps is None:
        return Declared(steps=Steps((default,)))
    return Declared(
        steps=steps, use_activation=steps.normalizes, is_of_tokens=not steps.pooling_types
    )

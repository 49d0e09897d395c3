"""The kinds of plugin: the public contract between core and plugins. Importing this package needs
only the standard library.

`KINDS` lists every extension point. The entry-point group of a kind is `pegboard.<kind>.v<major>`.
Each kind has one file in this folder. It defines `<Kind>Spec`, `<Kind>Need` (what selection asks
for), `<Kind>Setup` (what the constructor gets in addition to its options) and the interface itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Chosen = Literal["one", "keyed", "capability", "chain", "set"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One extension point.

    chosen: how a plugin of this kind is chosen. "one": by name or by rank. "keyed": by the
    entry-point name, which is the lookup key. "capability": by need, then by rank. "chain": several
    in the configured order; a lookup takes the first hit. "set": every enabled plugin.
    ambient: the plugin acts by being present, so it runs only when the configuration or the
    defaults enable it. roles: the processes that it runs in: A API server, E engine, W worker.
    provisional: the interface may still change within this major version. earlier: "module:Class"
    of what serves plugins of the major version before, built with a plugin's object; "" = they are
    not served.
    """

    name: str
    spec: str
    chosen: Chosen
    roles: str
    summary: str
    major: int = 1
    minor: int = 0
    ambient: bool = False
    provisional: bool = False
    earlier: str = ""

    @property
    def group(self) -> str:
        return f"pegboard.{self.name}.v{self.major}"


def _kind(name: str, spec: str, chosen: Chosen, roles: str, summary: str, **more: Any) -> Kind:
    """spec: the class name, if the class is in the file that has the kind's name, else
    "file:class"."""
    path = spec if ":" in spec else f"{name}:{spec}"
    return Kind(name, f"pegboard.interfaces.{path}", chosen, roles, summary, **more)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        _kind(
            "platform",
            "PlatformSpec",
            "one",
            "EW",
            "a device family: memory, threads, graph capture",
        ),
        _kind(
            "executor",
            "ExecutorSpec",
            "one",
            "E",
            "starts the workers and runs a batch on all of them",
        ),
        _kind(
            "collective",
            "CollectiveSpec",
            "capability",
            "W",
            "how the ranks of a model exchange tensors",
            provisional=True,
        ),
        _kind("model", "ModelSpec", "keyed", "W", "an architecture built from pegboard.layers"),
        _kind(
            "multimodal_processor",
            "MultiModalProcessorSpec",
            "keyed",
            "A",
            "makes of images, audio and video what a model computes with",
            provisional=True,
        ),
        _kind(
            "model_source",
            "ModelSourceSpec",
            "keyed",
            "AEW",
            "turns a model reference into local files",
        ),
        _kind(
            "weight_loader",
            "WeightLoaderSpec",
            "keyed",
            "AW",
            "describes a checkpoint and streams its weights",
        ),
        _kind(
            "weight_transfer",
            "WeightTransferSpec",
            "one",
            "W",
            "brings weights from a trainer in another process to a running engine",
            provisional=True,
        ),
        _kind(
            "quantization",
            "QuantizationSpec",
            "keyed",
            "W",
            "how weights are stored and multiplied",
        ),
        _kind("attention", "AttentionSpec", "capability", "W", "attention over the paged KV cache"),
        _kind(
            "kernel", "KernelSpec", "capability", "W", "a fast version of one op", provisional=True
        ),
        _kind(
            "kv_connector",
            "KVConnectorSpec",
            "chain",
            "EW",
            "moves KV between engines or tiers",
            provisional=True,
        ),
        _kind(
            "encoder_connector",
            "EncoderConnectorSpec",
            "one",
            "W",
            "shares what models make of images, audio and video",
            provisional=True,
        ),
        _kind(
            "scheduling_policy",
            "SchedulingPolicySpec",
            "one",
            "E",
            "order, victims and step budget",
        ),
        _kind(
            "draft",
            "DraftSpec",
            "keyed",
            "AW",
            "proposes tokens for speculative decoding",
            provisional=True,
        ),
        _kind(
            "structured_output",
            "StructuredOutputSpec",
            "chain",
            "AE",
            "grammars and token masks",
            provisional=True,
        ),
        _kind(
            "logits_processor",
            "LogitsProcessorSpec",
            "chain",
            "AW",
            "custom changes to logits",
            provisional=True,
        ),
        _kind("sampler", "SamplerSpec", "one", "W", "logits to token ids"),
        _kind(
            "tokenizer", "TokenizerSpec", "keyed", "A", "text to token ids and back, chat templates"
        ),
        _kind(
            "tool_parser",
            "output_parser:OutputParserSpec",
            "keyed",
            "A",
            "tool calls in the output",
            provisional=True,
        ),
        _kind(
            "reasoning_parser",
            "output_parser:OutputParserSpec",
            "keyed",
            "AE",
            "reasoning in the output",
            provisional=True,
        ),
        _kind(
            "pooler",
            "PoolerSpec",
            "one",
            "AW",
            "makes vectors or classes of prompts",
            major=3,
            earlier="pegboard.interfaces.earlier:PoolerOfV2",
            provisional=True,
        ),
        _kind(
            "io_processor",
            "IOProcessorSpec",
            "keyed",
            "A",
            "makes prompts of any data for a model that pools, and answers of its results",
            provisional=True,
        ),
        _kind(
            "builtin_tool",
            "BuiltinToolSpec",
            "set",
            "A",
            "tools that the server runs",
            ambient=True,
            provisional=True,
        ),
        _kind(
            "lora_resolver",
            "LoRAResolverSpec",
            "chain",
            "A",
            "finds adapters by name",
            provisional=True,
        ),
        _kind("metrics", "MetricsSpec", "set", "AE", "where measurements go", ambient=True),
        _kind("api", "ApiSpec", "set", "A", "HTTP routes", ambient=True),
        _kind(
            "command", "CommandSpec", "keyed", "–", "a word of the command line", provisional=True
        ),
        _kind(
            "model_family",
            "ModelFamilySpec",
            "keyed",
            "AE",
            "what a model family recommends",
            provisional=True,
        ),
    )
}

HOOKS_GROUP = "pegboard.hooks.v1"

"""The IO processor of an engine, with checks of what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import RequestError, blame, expect
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.io_processor import IOProcessor, IOProcessorSetup

if TYPE_CHECKING:
    from pegboard.data.output import RequestOutput
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

PromptAndParams = tuple[Prompt, PoolingParams]


class CheckedProcessor:
    """Implements `pegboard.interfaces.io_processor.IOProcessor`. Errors of the plugin are
    PluginFailures that name it."""

    def __init__(self, plugin: str, processor: IOProcessor) -> None:
        self._plugin = plugin
        self._processor = processor

    def prompts(self, data: Any) -> Sequence[PromptAndParams]:
        """See `IOProcessor.prompts`."""
        with blame(self._plugin):
            pairs = list(self._processor.prompts(data))
            for prompt, params in pairs:
                expect(prompt, Prompt, self._processor, "prompts")
                expect(params, PoolingParams, self._processor, "prompts")
        if not pairs:
            raise RequestError("the IO processor makes no prompts of the data", parameter="data")
        return pairs

    def answer(self, data: Any, outputs: "Sequence[RequestOutput]") -> Any:
        """See `IOProcessor.answer`."""
        with blame(self._plugin):
            return self._processor.answer(data, outputs)


def make_io_processor(
    plan: "EnginePlan", registry: "Registry | None", tokenizer: "Callable[[], Tokenizer]"
) -> IOProcessor | None:
    """Return the IO processor that the settings name, or None. Raises as building it does."""
    name = plan.settings.engine.io_processor_plugin
    if name is None or registry is None:
        return None
    entry = registry.find("io_processor", name)
    model = plan.settings.engine.model or plan.model_names[0]
    labels = () if plan.pooling is None else plan.pooling.labels
    setup = IOProcessorSetup(model, labels, tokenizer)
    return CheckedProcessor(entry.id, registry.build(entry, setup))


def required(processor: IOProcessor | None) -> IOProcessor:
    """Return it. Raises RequestError if there is none."""
    if processor is None:
        raise RequestError(
            "this engine has no IO processor for data; start it with io_processor_plugin",
            parameter="data",
        )
    return processor

"""A logits processor that the server imports by its name: every token is the letter B. And a
general plugin that registers a LoRA resolver."""

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.v1.sample.logits_processor import LogitsProcessor


class OnlyB(LogitsProcessor):
    @classmethod
    def validate_params(cls, params):
        if params.extra_args and params.extra_args.get("letter") == "wrong":
            raise ValueError("letter must not be wrong")

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        value = logits[:, 33].clone()
        logits.fill_(float("-inf"))
        logits[:, 33] = value
        return logits


class FolderResolver(LoRAResolver):
    async def resolve_lora(self, base_model_name, lora_name):
        if lora_name == "unknown":
            return None
        return LoRARequest(lora_name, 1, f"/adapters/{base_model_name}/{lora_name}")


def register():
    LoRAResolverRegistry.register_resolver("folder", FolderResolver())

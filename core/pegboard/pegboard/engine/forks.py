"""The completions of n > 1, which share the blocks of their prompt."""

from __future__ import annotations

from pegboard.engine.gates import Gate
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.requests import Request
from pegboard.interfaces.scheduling_policy import RequestStatus


class Forks(Gate):
    """The first completion is the parent. The others wait until it has computed the prompt, and
    start from its blocks."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    def ready(self, request: Request) -> bool:
        parent = request.parent
        if parent is None or parent.is_finished or parent.num_output_tokens:
            return True
        return parent.num_confirmed_tokens >= parent.num_prompt_tokens

    def ended(self, request: Request) -> None:
        request.leave_parent()

    def fork(self, request: Request) -> bool:
        """Give the request its parent's blocks, so that only the last prompt token must be
        computed. Return False if that is not possible; the request then starts normally."""
        parent = request.parent
        if parent is None or parent.status is not RequestStatus.RUNNING:
            return False
        if parent.lora != request.lora or self._kv.holds(request) or request.num_output_tokens:
            return False
        num_prompt = request.num_prompt_tokens
        if parent.num_confirmed_tokens < num_prompt:
            return False  # steps in flight may turn out to be invalid (a failed KV load)
        if not self._kv.fork(parent, request):
            return False
        request.num_computed_tokens = num_prompt - 1
        request.num_cached_tokens = parent.num_cached_tokens
        return True

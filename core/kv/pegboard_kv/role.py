"""What users and clients say to a connector. It imports nothing, because the API process loads
it."""

from __future__ import annotations

from typing import Literal

PARAMETERS = frozenset({"do_remote_prefill", "do_remote_decode"})
"""The names in `kv_transfer_params` that `StoreScheduler` reads. vLLM's proxies for disaggregated
prefill send them: the prefill engine gets do_remote_decode and answers with do_remote_prefill,
which the proxy hands on to the decode engine."""

PEER_PARAMETERS = PARAMETERS | {
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_first_hash",
}
"""Those that `peers` reads too. They say where the blocks of a prompt are, of how many tokens, and
what the first one is called."""

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
"""vLLM's names for what a connector does: it saves, it loads, or both."""

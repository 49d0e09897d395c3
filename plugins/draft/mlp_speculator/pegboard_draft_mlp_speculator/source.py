"""What the speculator is built from. The names of tensors and values follow vLLM's
mlp_speculator.py."""

from __future__ import annotations

from dataclasses import replace

from pegboard.interfaces.draft import DraftSource
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_drafts.sources import named_by_user, positive, target_sizes

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
WHAT = "an MLP speculator"


def source(target: Checkpoint, draft: Checkpoint | None) -> DraftSource:
    """Return the speculator, which reads the target's last hidden states. Raises ConfigError if the
    user has named none, and ModelError if it does not fit the target."""
    speculator = named_by_user(draft, "mlp_speculator")
    config = speculator.config
    count = positive(speculator, WHAT, "n_predict", config.get("n_predict"))
    width = positive(speculator, WHAT, "emb_dim", config.get("emb_dim", config.get("hidden_size")))
    inner = positive(speculator, WHAT, "inner_dim", config.get("inner_dim") or width)
    _, vocab_size = target_sizes(
        target, speculator, {"hidden_size": width, "vocab_size": config.get("vocab_size")}
    )
    values = {
        "n_predict": count,
        "emb_dim": width,
        "inner_dim": inner,
        "vocab_size": vocab_size,
        "architectures": [ARCHITECTURE],
    }
    speculator = replace(speculator, config={**config, **values}, architectures=(ARCHITECTURE,))
    return DraftSource(speculator, num_drafts=count)

"""What the draft model is built from."""

from __future__ import annotations

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.draft import DraftSource
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_drafts.sources import language_of


def source(target: Checkpoint, draft: Checkpoint | None) -> DraftSource:
    """Return the checkpoint that the user has named. Raises ConfigError if there is none, and
    ModelError if its vocabulary has another size."""
    if draft is None:
        raise ConfigError(
            "the method draft_model needs a model: set spec_model, or model in speculative_config"
        )
    sizes = [language_of(checkpoint.config).get("vocab_size") for checkpoint in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"{draft.path}: its vocabulary has {sizes[1]} tokens, and that of {target.path} has "
            f"{sizes[0]}; a draft model needs the same tokenizer"
        )
    return DraftSource(draft)

"""Specs of the draft plugin `mtp`, and of its older names, which serve one family each."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSpec
from pegboard.interfaces.spec import AtMost


def _spec(source: str, is_found: bool = False) -> DraftSpec:
    """is_found: the method is chosen for a checkpoint that the user has named without a method."""
    return DraftSpec(
        api="1.0",
        implementation="pegboard_draft_mtp.proposer:MTPProposer",
        source=f"pegboard_draft_mtp.source:{source}",
        suits="pegboard_draft_mtp.source:suits",
        flags=frozenset({"stores", "padded"}),
        supports={"max_drafts": AtMost(128), "architecture": is_found},
    )


MTP = _spec("mtp", is_found=True)
DEEPSEEK_MTP = _spec("deepseek_mtp")
ERNIE_MTP = _spec("ernie_mtp")
GLM4_MOE_MTP = _spec("glm4_moe_mtp")
LONGCAT_FLASH_MTP = _spec("longcat_flash_mtp")
MIMO_MTP = _spec("mimo_mtp")
PANGU_ULTRA_MOE_MTP = _spec("pangu_ultra_moe_mtp")
QWEN3_NEXT_MTP = _spec("qwen3_next_mtp")

"""Specs of this package. The layers are computed with the ops of core and of pegboard-models, which
run on every platform."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.spec import BATCH_INVARIANT


def _spec(implementation: str, is_divided: bool = True) -> ModelSpec:
    given = {"tensor_parallel", BATCH_INVARIANT} if is_divided else set()
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_mamba.{implementation}",
        flags=frozenset(given),
    )


MAMBA = _spec("pure:MambaModel")
MAMBA2 = _spec("pure:Mamba2Model")
FALCON_MAMBA = _spec("pure:FalconMambaModel")
BAMBA = _spec("hybrids:BambaModel")
GRANITE_HYBRID = _spec("hybrids:GraniteHybridModel")
JAMBA = _spec("hybrids:JambaModel")
LFM2 = _spec("lfm:Lfm2Model")
LFM2_MOE = _spec("lfm:Lfm2MoeModel")
FALCON_H1 = _spec("hybrids:FalconH1Model")
NEMOTRON_H = _spec("nemotron:NemotronHModel")
QWEN3_NEXT = _spec("qwen_next:Qwen3NextModel")
MINIMAX = _spec("minimax:MiniMaxModel")
ZAMBA2 = _spec("zamba:Zamba2Model")
PLAMO2 = _spec("plamo:Plamo2Model")
QWEN3_NEXT_MTP = _spec("prediction:Qwen3NextMTP")
RWKV = _spec("rwkv:RWKVModel", is_divided=False)
RECURRENT_GEMMA = _spec("griffin:RecurrentGemmaModel", is_divided=False)

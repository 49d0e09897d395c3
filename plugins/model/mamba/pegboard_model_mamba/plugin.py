"""Specs of this package. The layers are computed with the ops of core and of pegboard-models, which
run on every platform; only CPUs were tried."""

from pegboard.interfaces.model import ModelSpec


def _on_cpu(implementation: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_mamba.{implementation}",
        platforms=frozenset({"cpu"}),
        flags=frozenset({"tensor_parallel"}),
    )


MAMBA = _on_cpu("pure:MambaModel")
MAMBA2 = _on_cpu("pure:Mamba2Model")
FALCON_MAMBA = _on_cpu("pure:FalconMambaModel")
BAMBA = _on_cpu("hybrids:BambaModel")
GRANITE_HYBRID = _on_cpu("hybrids:GraniteHybridModel")
JAMBA = _on_cpu("hybrids:JambaModel")
LFM2 = _on_cpu("lfm:Lfm2Model")
LFM2_MOE = _on_cpu("lfm:Lfm2MoeModel")
FALCON_H1 = _on_cpu("hybrids:FalconH1Model")
NEMOTRON_H = _on_cpu("nemotron:NemotronHModel")
QWEN3_NEXT = _on_cpu("qwen_next:Qwen3NextModel")
MINIMAX = _on_cpu("minimax:MiniMaxModel")
ZAMBA2 = _on_cpu("zamba:Zamba2Model")
PLAMO2 = _on_cpu("plamo:Plamo2Model")
QWEN3_NEXT_MTP = _on_cpu("prediction:Qwen3NextMTP")

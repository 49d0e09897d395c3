"""The specs of the ops that models with states declare."""

from pegboard.interfaces.kernel import KernelSpec


def _op(name: str) -> KernelSpec:
    return KernelSpec(
        api="1.0",
        implementation=f"pegboard_models.state_ops:{name}",
        declares=True,
        tier="reference",
        supports={"dtype": {"float32", "bfloat16", "float16"}},
    )


CAUSAL_CONV = _op("causal_conv")
SELECTIVE_SCAN = _op("selective_scan")
CHUNKED_SCAN = _op("chunked_scan")
GATED_DELTA_RULE = _op("gated_delta_rule")
GATED_NORM = _op("gated_norm")

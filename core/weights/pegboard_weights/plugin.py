"""The spec of the op that transforms of activations declare."""

from pegboard.interfaces.kernel import KernelSpec

HADAMARD = KernelSpec(
    api="1.0",
    implementation="pegboard_weights.hadamard:hadamard",
    declares=True,
    tier="reference",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)

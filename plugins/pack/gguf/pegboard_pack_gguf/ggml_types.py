"""The tensor types of ggml: number in the file, name, elements per block, bytes per block. Standard
library only.

Source: the GGUF specification's `ggml_type` and the block structures of ggml-common.h.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
"""Types that are one torch dtype. All other types are stored as blocks."""


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A type. `stored` is its name in a TensorEntry: a torch dtype for plain types, the ggml name
    for blocks."""

    name: str
    block_size: int
    block_bytes: int

    @property
    def stored(self) -> str:
        return PLAIN.get(self.name, self.name)

    def num_bytes(self, num_elements: int) -> int:
        """Returns the number of bytes of `num_elements` elements, which must be whole blocks."""
        return num_elements // self.block_size * self.block_bytes


GGML_TYPES: dict[int, GGMLType] = {
    number: GGMLType(name, block_size, block_bytes)
    for number, name, block_size, block_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}

NEVER_STORED = {
    9: "Q8_1, which ggml uses for activations only",
    **dict.fromkeys((4, 5), "Q4_2 or Q4_3, which the format no longer has"),
    **dict.fromkeys(
        (31, 32, 33, 36, 37, 38),
        "an interleaved form of Q4_0 or IQ4_NL, which the format no longer has",
    ),
}
"""Types that files do not have, or no longer have, by number: what each one is."""

BY_STORED: dict[str, GGMLType] = {ggml_type.stored: ggml_type for ggml_type in GGML_TYPES.values()}

"""Rewrite a GGUF file with the matrices of its layers in another block type, for bench rows that
compare types.

    python tests/bench/write_gguf.py MODEL.gguf TARGET.gguf [Q4_0]

Metadata, embeddings, heads and norms are unchanged. Rounding twice makes the model worse, but not
slower or faster.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

LAYER_MATRIX = re.compile(r"blk\.\d+\.\w+\.weight")
FILE_TYPES = {
    name: getattr(LlamaFileType, f"MOSTLY_{name}")
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
}
"""Block types that can be written, with the value of `general.file_type` for each."""


def write_as(source: Path, target: Path, name: str) -> None:
    """Write the file. `target` is written completely or not at all."""
    kind = GGMLQuantizationType[name]
    reader = GGUFReader(source)
    part = target.with_name(target.name + ".part")
    writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
        ):
            continue
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(FILE_TYPES[name])
    for tensor in reader.tensors:
        data = tensor.data
        stored = tensor.tensor_type
        if LAYER_MATRIX.fullmatch(tensor.name) and len(tensor.shape) == 2 and stored != kind:
            data = quantize(dequantize(data, stored), kind)
            stored = kind
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(target)


def main() -> None:
    if len(sys.argv) not in (3, 4) or (len(sys.argv) == 4 and sys.argv[3] not in FILE_TYPES):
        sys.exit(f"usage: write_gguf.py MODEL.gguf TARGET.gguf [{'|'.join(FILE_TYPES)}]")
    write_as(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) == 4 else "Q4_0")


if __name__ == "__main__":
    main()

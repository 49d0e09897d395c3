"""Every Triton kernel is compiled for GPUs. This needs no GPU, and finds what the interpreter does
not: types and shapes that Triton refuses, and too much shared memory. It runs in another process,
because Triton interprets kernels here.

    python test_triton_compiles.py cuda 90
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED_BYTES = {
    "cuda 80": 99 * 1024,
    "cuda 90": 227 * 1024,
    "cuda 100": 227 * 1024,
    "hip gfx942": 64 * 1024,
}
"""Target → shared memory of one program. That of "cuda 80" is what the smaller chips of this
generation (86, 89) have."""
WIDTH = 128


def latent_kernels(native: str) -> list[tuple[Any, str, dict[str, Any], int]]:
    """Return those of latent attention, with the sizes of DeepSeek-V3 and 16 heads per rank, for
    prompts in bfloat16 and float32 and for decodes. See `kernels`."""
    from pegboard_attention_triton import attention, expanded, latent, latent_product, sparse

    heads, rank, rope = 16, 512, 64
    found = []
    for kind, tokens, rows, stored in (
        ("bf16", 4096, 2, ""),
        ("fp32", 4096, 2, ""),
        ("bf16", 4, 4, native),
        ("bf16", 0, 4, native),
    ):
        itemsize = 2 if kind == "bf16" else 4
        tiles = (
            latent.latent_tiles(tokens, rows, heads, rank, itemsize, 8192, 132)
            if tokens
            else latent.invariant_latent_tiles(heads, rank, itemsize, True)
        )
        constants = {
            "BLOCK_SIZE": 16,
            "HEADS": heads,
            "GROUP": min(heads, tiles.queries),
            "C": rank,
            "R": rope,
            "STORED": stored,
            "TOKENS": tiles.tokens,
            "QUERIES": tiles.queries,
            "KEYS": tiles.keys,
            "PAD_C": rank,
            "PAD_R": rope,
            "HAS_NUM_KEYS": rows == 2,
            "IS_OLD": rows == 2,
            "CHOSEN": 2048 if rows == 4 else 0,
            "IS_PART": rows == 2,
            "SPLITS": tiles.splits,
            "PRECISION": "ieee" if kind == "fp32" else "tf32",
        }
        types = (
            f"q q_rope *{kind}, cache {'*u8' if stored else f'*{kind}'}, maxima sums lse *fp32"
            ", chosen *i64, block_table query_start_loc seq_lens num_keys *i32, scale fp32"
        )
        types += ", out *fp32" if tiles.splits > 1 else f", out *{kind}"
        found.append((latent._attend_latents, types, constants, tiles.warps))
        place = {
            "BLOCK_SIZE": 16,
            "C": rank,
            "R": rope,
            "PAD_C": rank,
            "PAD_R": rope,
            "IS_PACKED": bool(stored),
        }
        types = f"latent k_rope *{kind}, cache {'*u8' if stored else f'*{kind}'}, slot_mapping *i64"
        found.append((latent._store_latents, types, place, 4))
        constants = {
            "BLOCK_SIZE": 16,
            "HEADS": 64,
            "D": 128,
            "PAD_HEADS": 64,
            "PAD_D": 128,
            "KEYS": sparse.KEYS,
            "HAS_NUM_KEYS": rows == 2,
            "PRECISION": "ieee" if kind == "fp32" else "tf32",
        }
        types = (
            f"vectors weights cache *{kind}, scores *fp32"
            ", block_table query_start_loc seq_lens num_keys *i32"
        )
        found.append((sparse._score_keys, types, constants, 4))
        block, keys = expanded.tiles_of(torch.float32 if kind == "fp32" else torch.bfloat16)
        constants = {
            "N": 128,
            "R": rope,
            "V": 128,
            "TOKENS": block,
            "KEYS": keys,
            "PAD_N": 128,
            "PAD_R": rope,
            "PAD_V": 128,
            "PRECISION": "ieee" if kind == "fp32" else "tf32",
        }
        types = f"q q_rope k k_rope v out *{kind}, lse *fp32, query_start_loc *i32, scale fp32"
        found.append((expanded._attend_expanded, types, constants, 4))
    for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        product = latent_product.constants_of(dtype)
        found.append((latent_product._multiply_heads, f"x matrices out *{kind}", product, 4))
    merged = {"DV": rank, "PAD_DV": rank, "IS_PART": True, "SPLITS": attention.MOST_SPLITS}
    types = "parts maxima sums lse *fp32, out *bf16"
    found.append((attention._merge, types, merged, 4))
    return found


def kernels(native: str) -> list[tuple[Any, str, dict[str, Any], int]]:
    """Return (kernel, types of its pointers and numbers, constants, warps). Arguments without a
    type are 32-bit integers. native: how the target reads a cache of e4m3fn."""
    from pegboard_attention_triton import attention, encoder, store
    from pegboard_kernel_triton import elementwise, norm, sampling

    found = []
    for tokens, rows, stored in ((4096, 2, ""), (4, 4, native), (0, 2, "")):
        tiles = (
            attention.choose_tiles(tokens, rows, 8, 4, WIDTH, 2, 8192, 132)
            if tokens
            else attention.invariant_tiles(4, WIDTH, 2)
        )
        constants = {
            "BLOCK_SIZE": 16,
            "GROUP": 4,
            "D": WIDTH,
            "DV": WIDTH,
            "PAD_D": WIDTH,
            "PAD_DV": WIDTH,
            "PRECISION": "tf32",
            "TOKENS": tiles.tokens,
            "QUERIES": tiles.queries,
            "KEYS": tiles.keys,
            "SPLITS": tiles.splits,
            "RULE": "window" if rows == 2 else "chunk",
            "HAS_SINKS": True,
            "HAS_SOFT_CAP": rows == 2,
            "HAS_NUM_KEYS": rows == 2,
            "IS_PART": rows == 2,
            "IS_INVARIANT": tokens == 0,
            "STORED": stored,
        }
        types = (
            f"q *bf16, k_cache v_cache {'*u8' if stored else '*bf16'}, k_scale v_scale sinks *fp32"
        )
        types += (
            ", block_table query_start_loc seq_lens num_keys *i32, maxima sums lse *fp32"
            ", scale soft_cap fp32"
        )
        types += ", out *fp32" if tiles.splits > 1 else ", out *bf16"
        found.append((attention._attend, types, constants, tiles.warps))
    found.append(
        (
            attention._merge,
            "parts maxima sums lse *fp32, out *bf16",
            {"DV": WIDTH, "PAD_DV": WIDTH, "IS_PART": True, "SPLITS": 8},
            4,
        )
    )
    tiles = encoder.encoder_tiles(4096, 8, 1, 64, 2)
    constants = {
        "GROUP": 1,
        "D": 64,
        "DV": 64,
        "TOKENS": tiles.tokens,
        "QUERIES": tiles.queries,
        "KEYS": tiles.keys,
        "PAD_D": 64,
        "PAD_DV": 64,
        "HAS_WINDOW": True,
        "HAS_BIAS": True,
        "PRECISION": "tf32",
    }
    types = "q k v out *bf16, query_start_loc *i32, bias *fp32, scale fp32"
    found.append((encoder._attend_both_ways, types, constants, tiles.warps))
    found += latent_kernels(native)
    for centres in (False, True):
        more = {"ADDS": True, "CENTRES": centres, "HAS_BIAS": centres}
        types = "x residual bias out *bf16, weight *fp32, eps fp32"
        found.append((norm._norm, types, {**more, "ROWS": 1, "COLUMNS": 4096}, 4))
    turn = {"D": WIDTH, "R": 32, "PAIRS": True, "HEADS": 16, "TURNED": 32, "COPIED": 64}
    found.append((elementwise._rope, "x out *bf16, cos sin *fp32", turn, 4))
    found.append(
        (elementwise._gated, "x out *bf16", {"SLOPE": 1.0, "CUBE": 0.0, "COLUMNS": 2048}, 4)
    )
    place = {
        "BLOCK_SIZE": 16,
        "HEADS": 8,
        "D": WIDTH,
        "DV": WIDTH,
        "CHANNELS": 1024,
        "MANTISSA": 3,
        "LARGEST": 448.0,
    }
    found.append(
        (
            store._store_kv,
            "k v *bf16, k_cache v_cache *u8, k_scale v_scale *fp32, slot_mapping *i64",
            place,
            4,
        )
    )
    cuts = {
        "DRAWS": True,
        "HAS_MIN_P": True,
        "HAS_TOP_K": True,
        "HAS_TOP_P": True,
        "ROWS": 1,
        "COLUMNS": sampling.COLUMNS,
    }
    found.append(
        (
            sampling._sample,
            "logits temperature min_p top_p *fp32, uniforms *fp64, top_k out *i64",
            cuts,
            8,
        )
    )
    rounded = rounded_products("native" in native)
    rounded += mixtures_and_invariant_products()
    return found + packed_products() + rounded + experts_and_adapters() + layers_with_states()


def rounded_products(has_float8: bool) -> list[tuple[Any, str, dict[str, Any], int]]:
    """Return the rounding of activations, and their products with codes of 8 bits."""
    from pegboard_kernel_triton import rounded_product

    found = []
    for is_float in (False, True)[: 1 + has_float8]:
        code = "*u8" if is_float else "*i8"
        rounding = {
            "GROUP": 4096,
            "MOST": 448.0 if is_float else 127.0,
            "IS_FLOAT": is_float,
            "IS_GIVEN": False,
            "BLOCK": rounded_product.ROUNDED,
        }
        types = f"x *bf16, codes {code}, scales *fp32, given fp32"
        found.append((rounded_product._round_rows, types, rounding, 4))
        for size, tokens, rows in ((4096, 16, 32), (128, 64, 128), (4096, 64, 128)):
            product = {
                "COLUMNS": 4096,
                "BLOCK": size,
                "GROUP": size,
                "IS_FLOAT": is_float,
                "IS_WHOLE": size == 4096,
                "TOKENS": tokens,
                "ROWS": rows,
                "WORDS": rounded_product.STEP // 4,
            }
            types = f"x {code}, x_scales scale *fp32, words *i32, out *bf16"
            found.append((rounded_product._rounded_product, types, product, 4))
    return found


def packed_products() -> list[tuple[Any, str, dict[str, Any], int]]:
    """Return the products with some forms of packed weights, with few and many tokens."""
    from pegboard_kernel_triton import packed_product
    from pegboard_kernel_triton.packed_form import Form, words_of

    forms = {
        "GPTQ": ("integer", 4, 128, "number", ("float16", ""), "zero"),
        "Q2_K": ("integer", 2, 16, "pair", ("uint8", "float16"), "minimum", 0, 256),
        "Q6_K": ("integer", 6, 16, "number", ("int8", "float16"), "", 32, 256),
        "NVFP4": ("e2m1", 4, 16, "e4m3", ("uint8", "float32"), "", 0, 4096),
        "FP8": ("e4m3", 8, 128, "number", ("float32", "")),
    }
    pointers = {"uint8": "*u8", "int8": "*i8", "float16": "*fp16", "float32": "*fp32"}
    found = []
    for decoding, bits, block, *more in forms.values():
        form = Form(decoding, bits, words_of(bits, 4096), block, *more)
        codes = "*i32" if form.words else "*u8"
        scale, outer = form.dtypes
        types = (
            f"x out bias *bf16, low middle high {codes}, scale {pointers[scale]}, outer "
            f"outer_shift {pointers[outer or scale]}, shift *i8, table scale_table *fp32, order "
            "order_rows starts *i32"
        )
        for count in (1, 512) if bits in (4, 8) else (1,):
            tiles = packed_product.choose_tiles(count, 4096, 4096, form)
            constants = packed_product.launch_options(form, 4096, bits == 4, torch.bfloat16, tiles)
            constants = {key: value for key, value in constants.items() if key.isupper()}
            for has_experts in (False, True) if decoding == "e4m3" else (False,):
                more = {"HAS_EXPERTS": has_experts, "HAS_BIAS": has_experts}
                found.append(
                    (packed_product._packed_product, types, {**constants, **more}, tiles.warps)
                )
    return found


def experts_and_adapters() -> list[tuple[Any, str, dict[str, Any], int]]:
    """Return the kernels whose rows are sorted, as `kernels` does, in the largest tiles."""
    from pegboard_kernel_triton import experts, lora

    found = []
    for rows, outputs, size in ((experts.FEW_ROWS, 64, 256), (experts.MANY_ROWS, 128, 128)):
        kind = "bf16" if rows == experts.FEW_ROWS else "fp32"
        tiles = {
            "HAS_BIAS": True,
            "PRECISION": "ieee",
            "BLOCK_M": rows,
            "BLOCK_N": outputs,
            "BLOCK_K": size // (2 if kind == "bf16" else 4),
        }
        types = f"x out bias *bf16, weights *{kind}, starts *i32"
        found.append((experts._multiply_experts, types, tiles, 4))
        tiles = {"PRECISION": "ieee", "BLOCK_M": rows, "BLOCK_R": 64}
        types = "a shrunk *fp32, ranks order starts *i32"
        lookup = {"IS_LOOKUP": kind == "bf16", "SPLIT": 512, "BLOCK_K": 64}
        types_of_x = ", x *i64" if kind == "bf16" else ", x *fp32"
        found.append((lora._shrink, types + types_of_x, {**tiles, **lookup}, 4))
        types = f"y *{kind}, b *bf16, shrunk *fp32, ranks order starts *i32"
        found.append((lora._expand, types, {**tiles, "SPLITS": 8, "TURNS": 1, "BLOCK_N": 128}, 4))
        types = f"y shrunk *{kind}, b *bf16, ranks order starts *i32"
        found.append((lora._expand, types, {**tiles, "SPLITS": 1, "TURNS": 3, "BLOCK_N": 128}, 4))
    return found


def mixtures_and_invariant_products() -> list[tuple[Any, str, dict[str, Any], int]]:
    """Return the router of DeepSeek-V3, the sum of its experts, and products of floats, as
    `kernels` does."""
    from pegboard_kernel_triton import float_product, mixture

    routing = {
        "GROUPS": 8,
        "SIZE": 32,
        "TOP_GROUPS": 4,
        "BEST": 2,
        "TOP_K": 8,
        "IS_SOFTMAX": True,
        "HAS_CORRECTION": True,
        "RENORMALIZES": True,
        "PAD_GROUPS": 8,
        "PAD_SIZE": 32,
        "PAD_K": 8,
    }
    types = "logits *bf16, correction weights *fp32, ids *i32, scale fp32"
    found = [(mixture._route, types, routing, 1)]
    sums = {"HAS_WEIGHTS": True, "HAS_SHARED": True, "HAS_GATE": True, "EACH": 8}
    types = "rows shared gate out *bf16, places *i32, weights *fp32"
    found.append((mixture._sum_experts, types, {**sums, "COLUMNS": mixture.COLUMNS}, 4))
    for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        constants = float_product.constants_of(2 * float_product.NARROW, dtype)
        constants = {key: value for key, value in constants.items() if key.isupper()}
        found.append((float_product._multiply_floats, f"x weight out *{kind}", constants, 4))
    return found


def layers_with_states() -> list[tuple[Any, str, dict[str, Any], int]]:
    """Return the kernels of layers with a state per request, as `kernels` does."""
    from pegboard_kernel_triton import chunks, states

    rows = "table seq_lens starts *i32, x gate q k v steps b c beta out *bf16"
    rows += ", state a_log skip *fp32, least most eps scale fp32"
    conv = {"WIDTH": 4, "PAST": 4, "HAS_BIAS": True, "ACTIVATES": True}
    conv |= {"BLOCK_T": states.TOKENS, "BLOCK_C": states.CHANNELS}
    found = [(states._causal_conv, f"{rows}, weight bias state *bf16", conv, 4)]
    numbers = {"BLOCK_D": states.NUMBERS // 16, "BLOCK_N": 16}
    found.append((states._selective_scan, rows, numbers, 4))
    types = f"{rows}, bias *fp32"
    numbers = {"BLOCK_P": states.NUMBERS // 128, "BLOCK_N": 128}
    found.append((states._chunked_scan, types, numbers, 4))
    for per_channel in (False, True):
        numbers = {"BLOCK_P": 16, "BLOCK_K": 128, "PER_CHANNEL": per_channel}
        found.append((states._delta_rule, types, numbers, 4))
    for kind, precision in (("bf16", "tf32"), ("fp32", "ieee")):
        typed = types.replace("*bf16", f"*{kind}")
        sizes = {"PRECISION": precision, "BLOCK_P": chunks.NUMBERS // 128}
        numbers = {**sizes, "BLOCK_T": chunks.TOKENS, "BLOCK_N": 128}
        found.append((chunks._scan_chunks, typed, numbers, 4))
        numbers = {**sizes, "BLOCK_T": chunks.DELTA_TOKENS, "BLOCK_K": 128}
        found.append((chunks._delta_chunks, typed, numbers, 4))
    norm = {"NORMALIZES": True, "GATES_FIRST": False, "BLOCK": 8192}
    found.append((states._gated_norm, f"{rows}, weight *bf16", norm, 4))
    return found


def main(backend: str, chip: str, *once: str) -> None:
    """Compile every kernel, in one form only if there is a third word. Prints its name and the
    shared memory of one program, in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget(
        backend, int(chip) if chip.isdigit() else chip, 32 if backend == "cuda" else 64
    )
    names = set()
    for kernel, types, constants, warps in kernels(
        "e4m3 native" if (backend, chip) == ("cuda", "90") else "e4m3"
    ):
        if once and kernel.fn.__name__ in names:
            continue
        names.add(kernel.fn.__name__)
        groups = (words.split() for words in types.split(", "))
        kinds = {name: kind for *names, kind in groups for name in names}
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, "i32")
            for name in kernel.arg_names
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": 2})
        print(kernel.fn.__name__, made.metadata.shared, flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_BYTES)
def test_kernels_compile(target: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    settings = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    once = ["once"] if os.environ.get("CI") else []
    command = [sys.executable, str(Path(__file__)), *target.split(), *once]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in sizes} == {
        "_attend",
        "_attend_both_ways",
        "_attend_latents",
        "_store_latents",
        "_score_keys",
        "_attend_expanded",
        "_multiply_heads",
        "_merge",
        "_norm",
        "_rope",
        "_gated",
        "_store_kv",
        "_sample",
        "_packed_product",
        "_round_rows",
        "_rounded_product",
        "_multiply_experts",
        "_multiply_floats",
        "_route",
        "_sum_experts",
        "_shrink",
        "_expand",
        "_causal_conv",
        "_selective_scan",
        "_chunked_scan",
        "_scan_chunks",
        "_delta_chunks",
        "_delta_rule",
        "_gated_norm",
    }
    assert all(int(size) <= SHARED_BYTES[target] for _, size in sizes), sizes


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Which implementation of an op a worker uses, and ops that plugins define."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pegboard import ops
from pegboard.errors import ConfigError, ModelError, PluginBroken
from pegboard.interfaces.kernel import KernelNeed, KernelSpec
from pegboard.worker.kernels import choose_kernels
from pegboard_testing.fake_parts import fake_worker_registry

GPU = "pegboard_testing.fake_gpu:FAKE_GPU"
FAST = KernelSpec(
    api="1.0", implementation="math:sqrt", tier="tuned", supports={"dtype": {"float32"}}
)
STEADY = replace(FAST, tier="portable", flags=frozenset({"batch_invariant"}))
OWN = KernelSpec(
    api="1.0",
    implementation="math:hypot",
    declares=True,
    tier="reference",
    supports={"dtype": {"float32", "float16"}},
)
ELSEWHERE = replace(OWN, platforms=frozenset({"other"}))
RECORDS = KernelSpec(
    api="1.0",
    implementation="builtins:list",
    flags=frozenset({"recorder"}),
    supports={"dtype": {"float32"}},
)


@pytest.fixture(autouse=True)
def _specs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the specs above where the entry points find them."""
    for name in ("FAST", "STEADY", "OWN", "ELSEWHERE", "RECORDS"):
        monkeypatch.setattr("pegboard_testing.fake_parts." + name, globals()[name], raising=False)


def chosen(dtype: str = "float32", invariant: bool = False, **kernels: str) -> Any:
    values = {name: f"pegboard_testing.fake_parts:{spec}" for name, spec in kernels.items()}
    need = KernelNeed(platform="fake", dtype=dtype, batch_invariant=invariant)
    return choose_kernels(fake_worker_registry(GPU, **values), need)


def test_a_plugin_is_taken_where_it_suits_and_the_reference_elsewhere() -> None:
    import math

    assert chosen(rope__fast="FAST")["rope"] is math.sqrt
    assert chosen("bfloat16", rope__fast="FAST")["rope"] is ops.rope
    assert chosen()["rms_norm"] is ops.rms_norm and chosen().replay is None


def test_a_plugin_declares_an_op_of_its_own_and_others_make_it_fast() -> None:
    import math

    assert chosen(wave__plain="OWN")["wave"] is math.hypot
    assert chosen(wave__plain="OWN", wave__fast="FAST")["wave"] is math.sqrt
    assert chosen("float16", wave__plain="OWN", wave__fast="FAST")["wave"] is math.hypot


def test_an_op_that_is_declared_for_another_platform_is_not_loaded() -> None:
    import math

    with pytest.raises(
        ModelError, match="no kernel plugin computes 'wave' on the platform fake\n.*nothing suits"
    ):
        chosen(wave__plain="ELSEWHERE")["wave"]
    assert chosen(wave__plain="ELSEWHERE", wave__fast="FAST")["wave"] is math.sqrt


def test_an_op_nobody_declares_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelError, match="there is no op 'wave'; known: add_layer_norm, "):
        chosen(wave__fast="FAST")["wave"]
    assert "kernel:wave.fast" in caplog.text and "there is no op 'wave'" in caplog.text
    monkeypatch.setenv("PEGBOARD_STRICT", "1")
    with pytest.raises(PluginBroken, match="there is no op 'wave'"):
        chosen(wave__fast="FAST")


def test_what_records_is_found_by_what_its_spec_says() -> None:
    kernels = chosen(any_name__at_all="RECORDS")
    assert kernels.replay is list and "any_name" not in kernels


def test_every_reference_has_the_name_it_is_chosen_by() -> None:
    assert all(name == op.__name__ for name, op in ops.OPS.items())
    assert ops.REFERENCES == ops.OPS | ops.WEIGHT_FORMATS
    assert torch.equal(
        ops.REFERENCES["float_weight"]((2, 3), torch.float32, "cpu").plain(), torch.zeros(2, 3)
    )


def test_batch_invariance_is_refused_where_nothing_has_it() -> None:
    """Layers that need another op are not affected. A reference that computes number by number
    has it."""
    import math

    kernels = chosen(invariant=True, rope__fast="FAST", rms_norm__fast="FAST", wave__plain="OWN")
    assert kernels["rope"] is ops.rope
    with pytest.raises(ConfigError, match="no kernel plugin is installed for 'float_weight'"):
        kernels["float_weight"]
    for name in ("rms_norm", "wave"):
        with pytest.raises(
            ConfigError,
            match=f"batch_invariant: no kernel plugin computes '{name}' so .*\n.*\n.*need: .*"
            "batch_invariant=True.*\n.*unsuitable .*it lacks the flag batch_invariant",
        ):
            kernels[name]
    assert "rms_norm" not in kernels and kernels.get("sample_tokens") is None
    assert chosen(invariant=True, any_name__at_all="RECORDS").replay is None
    kernels = chosen(invariant=True, rms_norm__fast="FAST", rms_norm__steady="STEADY")
    assert kernels["rms_norm"] is math.sqrt


def test_invariant_references() -> None:
    """They compute number by number, or copy."""
    assert ops.REFERENCES.keys() > ops.INVARIANT
    x = torch.randn(50, 64)
    for name in ("silu_mul", "gelu_tanh_mul"):
        op = ops.OPS[name]
        assert torch.equal(op(x), torch.cat([op(x[i : i + 1]) for i in range(50)]))

"""Hooks: only enabled ones run, a misspelled one is an error, and a failing one does not affect the
others."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import pytest

from pegboard.config.schema import PluginConfig
from pegboard.errors import PluginBroken, PluginFailure
from pegboard.interfaces.hooks import LoadedModel, Role
from pegboard.plugins.hooks import Hooks
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_distributions import FakeDistributions

MakeHooks = Callable[..., Hooks]


@pytest.fixture
def make(fake_distributions: FakeDistributions) -> MakeHooks:
    def build(**sources: str) -> Hooks:
        for name, source in sources.items():
            value = f"hooks_{name}:HOOKS" if "HOOKS =" in source else f"hooks_{name}"
            fake_distributions.add(
                f"acme-{name}", {"hooks": {name: value}}, {f"hooks_{name}": source}
            )
        policy = PluginConfig(enable=[f"hooks:{name}" for name in sources if name != "off"])
        return Hooks(Registry(fake_distributions.scan(), policy))

    return build


GOOD = "seen = []\ndef pegboard_role_started(role): seen.append(role)\n"
BAD = "def pegboard_role_started(role): raise RuntimeError('boom')\n"


def test_only_enabled_hooks_are_imported(make: MakeHooks) -> None:
    hooks = make(good=GOOD, off="raise SystemExit('imported')\n")
    hooks.call("pegboard_role_started", Role("engine"))
    assert sys.modules["hooks_good"].seen == [Role("engine")]


def test_failure_is_quarantined_with_one_warning(
    make: MakeHooks, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = make(a_bad=BAD, good=GOOD, z_bad=BAD)
    with caplog.at_level(logging.WARNING):
        for rank in range(3):
            hooks.call("pegboard_role_started", Role("worker", rank))
    assert len(sys.modules["hooks_good"].seen) == 3
    assert [record.levelname for record in caplog.records] == [
        "WARNING",
        "WARNING",
    ] and "boom" in caplog.text
    assert set(hooks.quarantined) == {"acme-a-bad:a_bad", "acme-z-bad:z_bad"}


def test_strict_makes_a_failure_fatal(make: MakeHooks, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = make(bad=BAD)
    monkeypatch.setenv("PEGBOARD_STRICT", "1")
    with pytest.raises(PluginFailure, match="acme-bad"):
        hooks.call("pegboard_role_started", Role("api"))


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            "def pegboard_docter_checks(): return []\n",
            "no hook 'pegboard_docter_checks', did you mean 'pegboard_doctor_checks'",
        ),
        ("def pegboard_role_started(roll): pass\n", "roll"),
        ("class HOOKS_:\n    pass\nHOOKS = HOOKS_\n", "is a class"),
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
    ],
)
def test_what_was_enabled_must_work(make: MakeHooks, source: str, match: str) -> None:
    with pytest.raises(PluginBroken, match=match) as raised:
        make(wrong=source)
    assert raised.value.plugin == "hooks:wrong (acme-wrong 1.0)"


def test_objects_and_fewer_arguments_work(make: MakeHooks) -> None:
    source = (
        "class Audit:\n    calls = 0\n    def pegboard_model_loaded(self): type(self).calls += "
        "1\nHOOKS = Audit()\n"
    )
    make(audit=source).call("pegboard_model_loaded", LoadedModel("m", "Llama", 2, 10, 0.5))
    assert sys.modules["hooks_audit"].Audit.calls == 1


def test_amendments_carry_the_plugins_name_and_failed_ones_are_undone(make: MakeHooks) -> None:
    hooks = make(
        a="def pegboard_amend_config(draft): draft['max_num_seqs'] = 8; draft['extra'] = [1]\n",
        b=(
            "def pegboard_amend_config(draft): draft['extra'].append(2); draft.pop('seed'); raise "
            "ValueError('no')\n"
        ),
        c="def pegboard_amend_config(draft): draft['extra'].append(3)\n",
    )
    draft: dict[str, object] = {"max_num_seqs": 4, "seed": 0}
    amendments = hooks.amend_config(draft)
    assert draft == {"max_num_seqs": 8, "seed": 0, "extra": [1, 3]}
    assert [(a.plugin, a.field, a.before, a.after) for a in amendments] == [
        ("acme-a:a", "extra", None, [1]),
        ("acme-a:a", "max_num_seqs", 4, 8),
        ("acme-c:c", "extra", [1], [1, 3]),
    ]


CHECKS = """
from pegboard.interfaces.hooks import Finding
def pegboard_doctor_checks(): return [Finding("note", "x", "y")]
"""


def test_checks_of_all_plugins(make: MakeHooks) -> None:
    assert len(make(one=CHECKS, two=CHECKS).call("pegboard_doctor_checks")) == 2

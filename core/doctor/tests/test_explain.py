"""`pegboard plugins show` and `pegboard plugins why`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pegboard.cli.main import command_setup
from pegboard.errors import ConfigError, PluginBroken, PluginNotFound
from pegboard.plugins import discovery
from pegboard_doctor import trials
from pegboard_doctor.explain import Show, Why
from pegboard_doctor.lock import Lock
from pegboard_testing.fake_distributions import FakeDistributions, spec_source
from pegboard_testing.tiny_engine import CONFIG

PARTS = """
from pegboard.interfaces.spec import Ok
def ok(facts): return Ok({"level": 3})
"""


@pytest.fixture
def fakes(
    fake_distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> FakeDistributions:
    fake_distributions.write(command_parts=PARTS)
    monkeypatch.setattr(discovery, "scan", fake_distributions.scan)
    return fake_distributions


def run(action: str, *words: str) -> int:
    return {"show": Show, "why": Why}[action](None, command_setup(f"plugins-{action}")).run(words)


def add_attention(fakes: FakeDistributions) -> None:
    wide = spec_source("attention", "WIDE", supports={"head_dim": True}, probe="command_parts:ok")
    narrow = spec_source(
        "attention", "NARROW", supports={"head_dim": frozenset({64})}, tier="tuned"
    )
    points = {"attention": {"wide": "command_specs:WIDE", "narrow": "command_specs:NARROW"}}
    fakes.add("acme", points, {"command_specs": wide + narrow}, version="2.0")


def write_model(folder: Path) -> str:
    """Write a checkpoint of which only the headers are read."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def test_show(fakes: FakeDistributions, capsys: pytest.CaptureFixture[str]) -> None:
    add_attention(fakes)
    assert run("show", "attention:wide", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["id"] == "attention:wide (acme 2.0)" and facts["probe"] == {
        "verdict": "ok",
        "facts": {"level": 3},
    }
    assert run("show", "attention:acme:narrow") == 0
    assert "head_dim={64}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="KIND:NAME"):
        run("show", "wide")


def test_why(fakes: FakeDistributions, capsys: pytest.CaptureFixture[str]) -> None:
    add_attention(fakes)
    assert run("why", "attention", "--need", "head_dim=80", "--need", "dtype=float16") == 1
    captured = capsys.readouterr()
    assert "nothing suits" in captured.out and "dtype='float16' is not declared" in captured.out
    assert run("why", "attention", "--need", "head_dim=64") == 0
    assert capsys.readouterr().out.startswith("attention → narrow")
    assert run("why", "attention", "--need", "head_dim=80", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["winner"]["name"] == "wide" and facts["candidates"][1]["state"] == "unsuitable"
    assert run("why", "attention", "--need", "head_dim=80", "--name", "narrow") == 1
    assert "what would work here: wide" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="did you mean 'head_dim'"):
        run("why", "attention", "--need", "headdim=80")
    with pytest.raises(PluginNotFound):
        run("why", "sampler")


def test_why_tells_what_would_have_to_change(
    fakes: FakeDistributions,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_attention(fakes)
    words = ("why", "attention", "--need", "head_dim=64")
    assert run(*words) == 0
    assert "outranked  tier portable < tuned; to use it: --attention-backend wide" in " ".join(
        capsys.readouterr().out.split()
    ).replace("outranked ", "outranked  ")
    monkeypatch.setenv("PEGBOARD_PLUGINS", "attention:narrow")
    assert run(*words, "--json") == 0
    (_, wide) = json.loads(capsys.readouterr().out)["candidates"]
    assert wide["change"] == "add attention:wide to plugins.allow"
    monkeypatch.delenv("PEGBOARD_PLUGINS")
    source = spec_source("kernel", "ONE", tier="tuned") + spec_source("kernel", "TWO")
    points = {"kernel": {"op.one": "op_specs:ONE", "op.two": "op_specs:TWO"}}
    fakes.add("ops", points, {"op_specs": source})
    assert run("why", "kernel") == 0
    assert "to use it: deny kernel:op.one" in capsys.readouterr().out


def test_why_as_if_another_device_were_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the plugins that are really installed."""
    model = write_model(tmp_path)
    assert run("why", "--model", model, "--as", "cuda", "--json") == 0
    made = {(one["kind"], one["key"]): one for one in json.loads(capsys.readouterr().out)}
    assert made["platform", ""]["rank"] == "assumed"
    assert made["kernel", "rms_norm"]["winner"]["name"] == "rms_norm.triton"
    (attention,) = (one for (kind, _), one in made.items() if kind == "attention")
    assert attention["winner"]["name"] == "triton" and "dtype='bfloat16'" in attention["need"]
    with pytest.raises(PluginNotFound, match="no installed plugin provides platform 'abacus'"):
        run("why", "--model", model, "--as", "abacus")


def test_why_from_a_lock_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was chosen there, and what stops it here."""
    file = str(tmp_path / "lock.json")
    lock = Lock(None, command_setup("plugins-lock")).run
    assert lock([file]) == 0
    with pytest.raises(ConfigError, match="records no choices: write it with --model"):
        run("why", "--lock", file)
    assert lock([file, "--model", write_model(tmp_path)]) == 0
    capsys.readouterr()
    assert run("why", "attention", "--lock", file) == 0
    assert "here: " not in (there := capsys.readouterr().out)
    monkeypatch.setenv("PEGBOARD_PLUGINS", "attention:flex")
    assert run("why", "attention", "--lock", file) == 1
    here = capsys.readouterr().out
    assert here.startswith(there)
    (line,) = here.removeprefix(there).splitlines()
    assert line.startswith("  here: pegboard-attention-flex:flex is chosen; ")
    assert line.endswith(" to plugins.allow")
    (tmp_path / "config.json").unlink()
    assert run("why", "attention", "--lock", file) == 0
    told = capsys.readouterr()
    assert told.out == there and "not compared with this machine" in told.err
    text = (tmp_path / "lock.json").read_text()
    (tmp_path / "lock.json").write_text(text.replace(json.dumps(str(tmp_path)), '"org/name"'))
    assert run("why", "attention", "--lock", file) == 0
    assert "org/name is not a path here; name the model with --model" in capsys.readouterr().err


def test_why_kernel_tells_of_each_op(
    fakes: FakeDistributions, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels of different ops do not compete."""
    assert run("why", "kernel") == 0 and "core's torch operators" in capsys.readouterr().out
    kernels = {
        "silu_mul.fast": ("FAST", "tuned"),
        "silu_mul.slow": ("SLOW", "reference"),
        "rms_norm.fast": ("NORM", "tuned"),
    }
    source = "".join(
        spec_source(
            "kernel",
            name,
            supports={"dtype": frozenset({"float32"})},
            tier=tier,
            probe="command_parts:ok",
        )
        for name, tier in kernels.values()
    )
    fakes.add(
        "acme",
        {"kernel": {n: f"kernel_specs:{name}" for n, (name, _) in kernels.items()}},
        {"kernel_specs": source},
    )
    assert run("why", "kernel", "--need", "dtype=float32") == 0
    out = capsys.readouterr().out
    assert "kernel rms_norm → rms_norm.fast" in out and "kernel silu_mul → silu_mul.fast" in out
    assert out.count("outranked") == 1 and out.splitlines()[-1] == "acme: level 3"
    assert run("why", "kernel", "--need", "dtype=bfloat16", "--json") == 0
    assert [(made["key"], made["winner"]) for made in json.loads(capsys.readouterr().out)] == [
        ("rms_norm", None),
        ("silu_mul", None),
    ]


def test_why_kernel_tells_what_is_not_replayed(
    fakes: FakeDistributions, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorder is not an op, whatever its name is. Attention that cannot be replayed is
    named."""
    recorder = spec_source(
        "kernel", "RECORDS", flags=frozenset({"recorder"}), probe="command_parts:ok"
    )
    attention = spec_source("attention", "PLAIN", platforms=frozenset({"x"}))
    attention += spec_source("attention", "QUICK", flags=frozenset({"replay"}))
    fakes.add(
        "acme", {"kernel": {"replay.one": "recorder_specs:RECORDS"}}, {"recorder_specs": recorder}
    )
    fakes.add(
        "beta",
        {"attention": {"plain": "some_specs:PLAIN", "quick": "some_specs:QUICK"}},
        {"some_specs": attention},
    )
    assert run("why", "kernel", "--platform", "x") == 0
    out = capsys.readouterr().out
    assert "kernel recorder → replay.one" in out and "kernel replay" not in out
    assert (
        "not replayed: sampling" in out
        and "attention plain, whose spec has no flag 'replay'" in out
        and "quick" not in out
    )
    assert run("why", "kernel", "--platform", "y", "--json") == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert made["key"] == "recorder" and len(made["notes"]) == 2


def test_why_of_a_keyed_kind(fakes: FakeDistributions, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.add(
        "acme",
        {"model": {"Llama": "keyed_specs:SPEC", "*": "keyed_specs:SPEC"}},
        {"keyed_specs": spec_source("model")},
    )
    assert run("why", "model", "--name", "Llama") == 0
    assert "exact name" in capsys.readouterr().out
    assert run("why", "model", "--name", "Mamba") == 0
    assert "any name" in capsys.readouterr().out


def test_no_winner_is_shown_where_nothing_is_asked_for(
    fakes: FakeDistributions, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("tool_parser", "kv_connector", "metrics"):
        fakes.add(
            f"acme-{kind}".replace("_", "-"),
            {kind: {"one": "specs:SPEC", "two": "specs:SPEC"}},
            {"specs": spec_source("model")},
        )
        assert run("why", kind) == 0
        title, _, *rows = capsys.readouterr().out.splitlines()
        named = [row.split()[1:3] for row in rows]
        assert "→" not in title and named == [
            [name, f"acme-{kind}".replace("_", "-")] for name in ("one", "two")
        ]
        assert run("why", kind, "--json") == 0
        assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["one", "two"]
    assert title.startswith("metrics: all that are enabled run") and rows[0].endswith("not enabled")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("while True: pass", "takes more than 1 s"),
        ("import os; os._exit(0)", "ends the interpreter"),
    ],
)
@pytest.mark.parametrize("part", ["probe", "suits"])
@pytest.mark.parametrize(
    "words", [("why", "attention"), ("show", "attention:stuck")], ids=lambda words: words[0]
)
def test_a_plugin_that_hangs_or_exits_is_named(
    fakes: FakeDistributions,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    told: str,
    part: str,
    words: tuple[str, str],
) -> None:
    fakes.write(stuck_parts=f"def part(given):\n    {body}\n")
    spec = spec_source("attention", **{part: "stuck_parts:part"})
    fakes.add("acme", {"attention": {"stuck": "stuck_spec:SPEC"}}, {"stuck_spec": spec})
    monkeypatch.setattr(trials, "LIMIT_S", 1.0)
    if (words[0], part) == ("show", "suits"):
        return  # it is not asked
    with pytest.raises(PluginBroken, match=rf"attention:stuck \(acme 1.0\): its {part} {told}"):
        run(*words)

"""The package `vllm` exists only when it was asked for, and says what it does not have."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from pegboard_vllm_compat import finder
from pegboard_vllm_compat.command import VllmCommand, run_words
from pegboard_vllm_compat.names import MODULES

from pegboard.errors import UsageError
from pegboard.interfaces.command import Command, CommandSetup
from pegboard_testing.contract_command import CommandContract
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("command", "vllm-compat"))


class TestCommand(CommandContract):
    word = "vllm-compat"
    forms = ((), ("plugins",), ("serve",))

    def command(self, setup: CommandSetup) -> Command:
        return VllmCommand(None, setup)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.usefixtures("vllm")
def test_every_name_has_its_home(module: str) -> None:
    imported = import_module(module)
    assert {name: getattr(imported, name) for name in MODULES[module]}.keys() == {*imported.__all__}


def test_importing_the_package_makes_no_vllm() -> None:
    code = "import pegboard_vllm_compat.plugin, importlib.util as u; assert not u.find_spec('vllm')"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("vllm")
def test_other_names_are_errors() -> None:
    with pytest.raises(ImportError, match="does not have vllm.assets.*open a local file"):
        import_module("vllm.assets.image")
    with pytest.raises(ModuleNotFoundError, match=r"nearest name is vllm\.sampling_params"):
        import_module("vllm.sampling_param")
    with pytest.raises(AttributeError, match=r"does not have vllm\.SamplingParam; the nearest"):
        _ = import_module("vllm").SamplingParam
    with pytest.raises(ImportError, match="StructuredOutputsParams"):
        exec("from vllm.sampling_params import GuidedDecodingParams")


def test_a_real_vllm_is_not_hidden_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    (tmp_path / "script.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="--shadow"):
        run_words([str(tmp_path / "script.py")])
    assert not any(isinstance(one, finder.VllmFinder) for one in sys.meta_path)


def test_wrong_usage() -> None:
    with pytest.raises(UsageError, match="nothing"):
        run_words([])
    with pytest.raises(UsageError, match=r"no script nowhere\.py"):
        run_words(["nowhere.py"])


def test_the_module_runs_a_script(tmp_path: Path) -> None:
    """The script sees its arguments, and its folder on sys.path."""
    (tmp_path / "beside.py").write_text("VALUE = 3")
    (tmp_path / "script.py").write_text(
        "import sys, vllm, beside; print(vllm.__version__[:4], sys.argv[1:], beside.VALUE)"
    )
    words = [sys.executable, "-m", "pegboard_vllm_compat", str(tmp_path / "script.py"), "--a", "b"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ended.stdout == "0.13 ['--a', 'b'] 3\n"


def test_an_error_of_the_script(tmp_path: Path) -> None:
    """It is shown with its traceback."""
    (tmp_path / "script.py").write_text("from vllm import SamplingParams\nSamplingParams(n=0)")
    words = [sys.executable, "-m", "pegboard_vllm_compat", str(tmp_path / "script.py")]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr and "script.py" in ended.stderr

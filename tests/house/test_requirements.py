"""A distribution imports only what it declares. The declarations are read from the installed
metadata.

A requirement without an extra allows any import. A requirement of an extra allows only imports that
the file works without: inside `try` with `except ImportError`, or for type checkers only.
`NEEDS_EXTRA` lists the folders that are only useful with an extra. There, the requirements of the
extra count like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from import_graph import module_name
from members import Member, members, tree_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NEEDS_EXTRA = {
    ("pegboard-models", "images"): (
        "pegboard_models.patch_positions",
        "pegboard_models.patch_processor",
        "pegboard_models.pixtral_images",
        "pegboard_models.processing",
        "pegboard_models.videos",
    ),
    ("pegboard-models", "audio"): ("pegboard_models.log_mel",),
    ("pegboard-testing", "images"): (
        "pegboard_testing.contract_multimodal_processor",
        "pegboard_testing.deepseek_images",
        "pegboard_testing.media_peers",
        "pegboard_testing.video_peers",
    ),
    ("pegboard-testing", "video"): ("pegboard_testing.films",),
    ("pegboard-testing", "release"): ("pegboard_testing.authoring.release",),
    ("pegboard-testing", "site"): ("pegboard_testing.authoring.site",),
    **dict.fromkeys(
        [("pegboard-model-source-object-storage", extra) for extra in ("s3", "gs")],
        ("pegboard_model_source_object_storage.stores",),
    ),
    ("pegboard-executor-local", "torch"): ("pegboard_executor_local.launched",),
    ("pegboard", "torch"): ("pegboard.worker", "pegboard.layers", "pegboard.ops"),
    # only imported after a plugin has imported pydantic for its options
    ("pegboard", "options"): ("pegboard.plugins.options",),
    ("pegboard-testing", "torch"): (
        "pegboard_testing.fake_collective",
        "pegboard_testing.key_parts",
        "pegboard_testing.attention_reference",
        "pegboard_testing.authoring.formats_page",
        "pegboard_testing.authoring.generate",
        "pegboard_testing.contract_attention",
        "pegboard_testing.contract_collective",
        "pegboard_testing.contract_draft_model",
        "pegboard_testing.contract_encoder",
        "pegboard_testing.contract_float_weight",
        "pegboard_testing.contract_kernel",
        "pegboard_testing.contract_kv_connector",
        "pegboard_testing.contract_latent",
        "pegboard_testing.contract_logits_processor",
        "pegboard_testing.contract_weight_transfer",
        "pegboard_testing.contract_model",
        "pegboard_testing.contract_platform",
        "pegboard_testing.contract_peers",
        "pegboard_testing.contract_pooler",
        "pegboard_testing.contract_quantization",
        "pegboard_testing.contract_sample_tokens",
        "pegboard_testing.contract_sampler",
        "pegboard_testing.contract_weight_loader",
        "pegboard_testing.fake_build",
        "pegboard_testing.contract_invariance",
        "pegboard_testing.contract_invariant_attention",
        "pegboard_testing.fake_flash_attn",
        "pegboard_testing.fake_flashinfer",
        "pegboard_testing.fake_forwards",
        "pegboard_testing.fake_driver",
        "pegboard_testing.exact_sums",
        "pegboard_testing.fake_gpu",
        "pegboard_testing.fake_torch_cuda",
        "pegboard_testing.fake_triton",
        "pegboard_testing.held_memory",
        "pegboard_testing.stored_rows",
        "pegboard_testing.layouts",
        "pegboard_testing.fake_parts",
        "pegboard_testing.sampling_reference",
        "pegboard_testing.video_peers",
    ),
    ("pegboard-testing", "triton"): ("pegboard_testing.fake_triton",),
    ("pegboard-testing", "server"): (
        "pegboard_testing.contract_api",
        "pegboard_testing.contract_metrics",
        "pegboard_testing.authoring.metrics_page",
        "pegboard_testing.served_app",
    ),
}
"""(distribution, extra) → modules that run only where the extra is installed."""
ERRORS = {"ImportError", "ModuleNotFoundError", "Exception"}


def found_imports(tree: ast.AST, is_guarded: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Yields (module, line, whether the file works without it) for every absolute import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, is_guarded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno, is_guarded
        elif isinstance(node, ast.Try):
            caught = {
                name.id
                for handler in node.handlers
                for name in ast.walk(handler.type or node)
                if isinstance(name, ast.Name)
            }
            for part in node.body:
                yield from found_imports(
                    ast.Module([part], []), is_guarded or bool(caught & ERRORS)
                )
            for part in (*node.handlers, *node.orelse, *node.finalbody):
                yield from found_imports(part, is_guarded)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from found_imports(ast.Module(node.body, []), True)
            yield from found_imports(ast.Module(node.orelse, []), is_guarded)
        else:
            yield from found_imports(node, is_guarded)


@cache
def providers() -> dict[str, set[str]]:
    """Top-level module → the distributions that install it."""
    found = {
        module: set(map(canonicalize_name, names))
        for module, names in packages_distributions().items()
    }
    # editable distributions list no modules
    return {**found, **{member.module: {member.name} for member in members()}}


def declared(member: Member) -> dict[str, set[str]]:
    """Required distribution → the extras of `member` that require it; "" when it is always
    required. A requirement with an extra, such as pegboard[torch], also brings the requirements of
    that extra."""
    found: dict[str, set[str]] = {}
    extras = distribution(member.name).metadata.get_all("Provides-Extra") or []
    for requirement in map(Requirement, distribution(member.name).requires or ()):
        always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        asked = {
            extra
            for extra in extras
            if requirement.marker and requirement.marker.evaluate({"extra": extra})
        }
        found.setdefault(canonicalize_name(requirement.name), set()).update(
            {""} if always else asked
        )
        for brought in brought_by(requirement):
            found.setdefault(brought, set()).update({""} if always else asked)
    return found


def brought_by(requirement: Requirement) -> Iterator[str]:
    """Yields the distributions that the extras of a requirement require."""
    for extra in requirement.extras:
        for inner in map(Requirement, distribution(requirement.name).requires or ()):
            if (
                inner.marker
                and inner.marker.evaluate({"extra": extra})
                and not inner.marker.evaluate({"extra": ""})
            ):
                yield canonicalize_name(inner.name)


def undeclared(member: Member, requirements: dict[str, set[str]], path: Path) -> Iterator[str]:
    """Yields the imports of a file that its distribution does not declare."""
    name = module_name(path, member.folder)
    for module, line, is_guarded in found_imports(tree_of(path)):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top == member.module:
            continue
        extras = set().union(
            *(requirements.get(provider, set()) for provider in providers().get(top, ()))
        )
        in_folder = any(
            name.startswith(NEEDS_EXTRA.get((member.name, extra), ("-",))) for extra in extras
        )
        if not ("" in extras or (extras and (is_guarded or in_folder))):
            why = f"extra {', '.join(sorted(extras))} only" if extras else "not declared"
            yield f"{path.relative_to(member.folder)}:{line} imports {module}: {why}"


@pytest.mark.parametrize("member", members(), ids=lambda member: member.name)
def test_imports_are_declared(member: Member) -> None:
    requirements = declared(member)
    wrong = [line for path in member.sources() for line in undeclared(member, requirements, path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("member", members(), ids=lambda member: member.name)
def test_the_installed_metadata_is_that_of_the_project(member: Member) -> None:
    """After a change of a pyproject.toml, run `make setup`."""
    extras = member.metadata.get("optional-dependencies", {})
    project = {
        canonicalize_name(Requirement(text).name)
        for text in member.metadata.get("dependencies", [])
    }
    project |= {
        canonicalize_name(Requirement(text).name) for texts in extras.values() for text in texts
    }
    installed = {
        canonicalize_name(Requirement(text).name)
        for text in distribution(member.name).requires or ()
    }
    assert installed == project, "run `make setup`"


def test_what_a_guard_is() -> None:
    source = """
import a
try:
    import b
except ImportError:
    import c
if TYPE_CHECKING:
    import d
def function():
    try:
        from e.f import g
    except (ImportError, OSError):
        pass
    try:
        import h
    except ValueError:
        pass
"""
    found = {module: is_guarded for module, _, is_guarded in found_imports(ast.parse(source))}
    assert found == {"a": False, "b": True, "c": False, "d": True, "e.f": True, "h": False}

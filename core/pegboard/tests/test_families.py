"""Which family a checkpoint belongs to, and which parsers the family selects."""

from __future__ import annotations

import pytest

from pegboard.errors import PluginNotFound
from pegboard.interfaces.model_family import ModelFamilyNeed
from pegboard.plan.families import Family, choose_family, choose_parser
from pegboard.plugins.registry import Registry

PLUGINS = """
from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

BY_MARKER = ModelFamilySpec(api="1.0", template_markers=("<call>", "</call>"), recommends={"tool_parser": "calls"})
BY_TYPE = ModelFamilySpec(
    api="1.0", model_types=frozenset({"toy"}), architectures=frozenset({"ToyForCausalLM"}), template_markers=("<call>",),
    recommends={"tool_parser": "absent", "reasoning_parser": "thoughts"}, chat_template="acme_templates:toy.jinja",
)
TWIN = ModelFamilySpec(api="1.0", template_markers=("<call>", "call>"), recommends={"tool_parser": "calls"})
BY_FILE = ModelFamilySpec(
    api="1.0", model_types=frozenset({"toy"}), file_patterns=("toy.json", "toy.model.v*"), recommends={"tokenizer": "toy"}
)
PARSER = OutputParserSpec(api="1.0", implementation="acme_families:nothing")
"""  # noqa: E501


@pytest.fixture
def registry(fake_distributions):
    """Return a function that makes a registry with the given families and the parsers `calls` and
    `thoughts`."""

    def make(**families: str) -> Registry:
        points = {
            "model_family": {
                name: f"acme_families:{variable}" for name, variable in families.items()
            },
            "tool_parser": {"calls": "acme_families:PARSER"},
            "reasoning_parser": {"thoughts": "acme_families:PARSER"},
        }
        fake_distributions.add("acme-families", points, {"acme_families": PLUGINS})
        templates = fake_distributions.root / "acme_templates"
        templates.mkdir()
        (templates / "toy.jinja").write_text("family template")
        return Registry(fake_distributions.scan())

    return make


TEMPLATE = "{{ messages }} <call>{{ tools }}</call>"


def need(model_type="toy", architecture="ToyForCausalLM", template=TEMPLATE) -> ModelFamilyNeed:
    return ModelFamilyNeed(
        model_type=model_type, architectures=frozenset({architecture}), template=template
    )


def test_the_most_matches_win(registry):
    found = registry(markers="BY_MARKER", toy="BY_TYPE")
    assert choose_family(found, need()).name == "toy"
    assert "model type toy, architecture ToyForCausalLM" in choose_family(found, need()).reason
    assert choose_family(found, need(model_type="llama", architecture="Other")).name == "markers"
    decision = found.decisions["model_family", ""]
    assert decision.winner.name == "markers"
    assert {c.entry.name: c.state for c in decision.candidates} == {
        "markers": "selected",
        "toy": "unsuitable",
    }
    assert len(decision.need) < 200  # the message does not contain the template


def test_a_family_needs_everything_it_names(registry):
    found = registry(markers="BY_MARKER", toy="BY_TYPE")
    for template in ("no markers", None):
        family = choose_family(found, need(template=template))
        assert family.name is None and family.reason == "no installed family fits"
    reasons = [candidate.reason for candidate in found.decisions["model_family", ""].candidates]
    assert all("the chat template has no '<call>'" in reason for reason in reasons)


def test_a_tie_recommends_nothing_and_says_so(registry):
    found = registry(markers="BY_MARKER", twin="TWIN")
    family = choose_family(found, need())
    assert family.name is None and family.recommends == {}
    assert "tie: markers and twin" in family.reason
    assert choose_parser(found, "tool_parser", "auto", family) is None
    assert "tie" in found.decisions["tool_parser", ""].rank


def test_parsers_follow_the_family_or_the_user(registry):
    found = registry(markers="BY_MARKER")
    family = choose_family(found, need())
    assert choose_parser(found, "tool_parser", "auto", family) == "acme-families:calls"
    assert found.decisions["tool_parser", ""].rank == "recommended by the model family markers"
    assert choose_parser(found, "reasoning_parser", "auto", family) is None
    assert choose_parser(found, "reasoning_parser", "thoughts", family) == "acme-families:thoughts"
    assert choose_parser(found, "tool_parser", "none", family) is None
    with pytest.raises(PluginNotFound, match="clals"):
        choose_parser(found, "tool_parser", "clals", family)


def test_a_recommended_parser_that_is_not_installed_is_said_and_left_out(registry, caplog):
    found = registry(toy="BY_TYPE")
    family = choose_family(found, need())
    assert choose_parser(found, "tool_parser", "auto", family) is None
    assert (
        "absent" in caplog.text
        and "absent is recommended" in found.decisions["tool_parser", ""].rank
    )
    assert choose_parser(found, "reasoning_parser", "auto", family) == "acme-families:thoughts"


def test_the_family_template_serves_models_whose_own_knows_no_tools(registry, monkeypatch):
    found = registry(toy="BY_TYPE")
    assert choose_family(found, need()).chat_template is None
    assert choose_family(found, need(template="{{ messages }} <call>")) == Family(
        "toy",
        "matched model type toy, architecture ToyForCausalLM, template marker '<call>'",
        {"tool_parser": "absent", "reasoning_parser": "thoughts"},
        "family template",
    )
    for source in (
        "<call> {% if 'tools' in messages[0] %}{{ messages[0]['tools'] }}",
        "<call>{{ messages[0].tools }}",
    ):
        assert choose_family(found, need(template=source)).chat_template == "family template"
    for source in (
        "<call> {% if not tools is defined %}",
        "<call>{%- for t in tools%}",
        "<call>{{tools|tojson}}",
    ):
        assert choose_family(found, need(template=source)).chat_template is None


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"toy.model.v3", "a.json"}, "files"),
        ({"toy.json"}, "files"),
        ({"toy.model"}, "markers"),
        (None, "markers"),
    ],
)
def test_a_file_beside_the_checkpoint_tells_a_family(registry, files, name):
    found = registry(markers="BY_MARKER", files="BY_FILE")
    asked = ModelFamilyNeed(
        model_type="toy",
        template="" if name == "files" else TEMPLATE,
        files=files and frozenset(files),
    )
    assert choose_family(found, asked).name == name
    other = ModelFamilyNeed(model_type="other", files=frozenset({"toy.json"}))
    assert choose_family(found, other).name is None  # the model type must also match

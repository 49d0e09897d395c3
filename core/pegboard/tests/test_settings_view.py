"""Which settings are shown, and which are never shown."""

from __future__ import annotations

import json

from pegboard.config.schema import EngineConfig, PluginConfig, Settings
from pegboard.config.sources import HIDDEN, describe_settings
from pegboard_server.settings import ServerConfig


def test_secrets_are_hidden_and_the_rest_is_shown():
    settings = Settings(
        EngineConfig(model="m", hf_token="s3cret"),
        PluginConfig(
            options={
                "model_source.hub": {
                    "token": "s3cret",
                    "nested": {"password": "s3cret"},
                    "retries": 2,
                }
            }
        ),
        {"server": ServerConfig(api_key=["s3cret", "s3cret2"], port=5)},
        {"model": "the command line"},
    )
    shown = describe_settings(settings)
    assert "s3cret" not in json.dumps(shown)
    assert (
        shown["engine"]["model"] == "m"
        and shown["engine"]["hf_token"] == HIDDEN
        and shown["server"]["port"] == 5
    )
    assert shown["plugins"]["options"]["model_source.hub"] == {
        "token": HIDDEN,
        "nested": {"password": HIDDEN},
        "retries": 2,
    }
    assert shown["sources"] == {"model": "the command line"}


def test_what_is_not_set_is_shown_as_such():
    shown = describe_settings(Settings(sections={"server": ServerConfig()}))
    assert shown["engine"]["hf_token"] is None and shown["server"]["api_key"] is None
    assert shown["engine"]["max_num_batched_tokens"] is None, "a plural noun is no secret"

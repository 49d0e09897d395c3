"""The spec of the api `openai`."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec

OPENAI = ApiSpec(api="1.0", implementation="pegboard_api_openai.api:OpenAIApi")

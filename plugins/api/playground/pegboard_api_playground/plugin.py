"""Spec of the api `playground`."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec
from pegboard_api_playground.files import FILES

PLAYGROUND = ApiSpec(
    api="1.0",
    implementation="pegboard_api_playground.page:PlaygroundApi",
    # The files hold nothing secret. The page asks for the key and sends it with its own requests.
    public_paths=("/playground", "/playground/", *(f"/playground/{name}" for name in FILES)),
    switches={"/playground": "--playground", "/playground/": "--playground"},
)

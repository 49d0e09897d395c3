"""The specs of the apis `health`, `admin` and `openapi`."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec

HEALTH = ApiSpec(
    api="1.0",
    implementation="pegboard_api_admin.health:HealthApi",
    public_paths=("/health", "/ping", "/version"),
)
ADMIN = ApiSpec(api="1.0", implementation="pegboard_api_admin.admin:AdminApi")
OPENAPI = ApiSpec(api="1.0", implementation="pegboard_api_admin.openapi:OpenApi")

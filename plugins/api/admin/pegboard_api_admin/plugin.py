"""Specs of the apis `health`, `admin`, `openapi`, `lora_admin` and `worker_admin`."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec

HEALTH = ApiSpec(
    api="1.0",
    implementation="pegboard_api_admin.health:HealthApi",
    public_paths=("/health", "/ping", "/version"),
    unmeasured_paths=("/health", "/ping", "/version", "/load"),
)
ADMIN = ApiSpec(
    api="1.0",
    implementation="pegboard_api_admin.admin:AdminApi",
    options="pegboard_api_admin.options:AdminOptions",
    unmeasured_paths=("/server_info",),
)
OPENAPI = ApiSpec(api="1.0", implementation="pegboard_api_admin.openapi:OpenApi")
LORA = ApiSpec(
    api="1.0",
    implementation="pegboard_api_admin.lora:LoRAApi",
    options="pegboard_api_admin.options:LoRAOptions",
    flags=frozenset({"loads_adapters"}),
)
WORKERS = ApiSpec(
    api="1.0", implementation="pegboard_api_admin.workers:WorkersApi", options="pegboard_api_admin.options:WorkerOptions"
)

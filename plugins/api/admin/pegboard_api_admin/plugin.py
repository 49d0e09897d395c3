"""Specs of the apis `health`, `admin`, `openapi`, `lora_admin` and `worker_admin`."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec

ENABLE = "--plugins-enable api:{}"

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
    switches={
        **dict.fromkeys(
            (
                "/server_info",
                "/reset_prefix_cache",
                "/reset_mm_cache",
                "/v1/pegboard/plugins",
                "/pause",
                "/resume",
                "/is_paused",
                "/sleep",
                "/wake_up",
                "/is_sleeping",
                "/abort_requests",
            ),
            ENABLE.format("admin"),
        ),
        **dict.fromkeys(
            ("/scale_elastic_ep", "/is_scaling_elastic_ep"),
            f"{ENABLE.format('admin')} --enable-elastic-ep",
        ),
        **dict.fromkeys(
            ("/start_profile", "/stop_profile"),
            f"{ENABLE.format('admin')} --api.admin.profile_directory FOLDER",
        ),
    },
)
OPENAPI = ApiSpec(api="1.0", implementation="pegboard_api_admin.openapi:OpenApi")
LORA = ApiSpec(
    api="1.0",
    implementation="pegboard_api_admin.lora:LoRAApi",
    options="pegboard_api_admin.options:LoRAOptions",
    switches=dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "--allow-runtime-lora-updating"
    ),
)
WORKERS = ApiSpec(
    api="1.0",
    implementation="pegboard_api_admin.workers:WorkersApi",
    options="pegboard_api_admin.options:WorkerOptions",
    switches=dict.fromkeys(
        ("/collective_rpc", "/init_weight_transfer_engine", "/update_weights"),
        ENABLE.format("worker_admin"),
    ),
)

"""The section `server` of the settings. The names are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from pegboard.config.setting import check, doc
from pegboard.errors import ConfigError


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server."""

    host: Annotated[str, doc("IP address or host name to listen on", is_common=True)] = "127.0.0.1"
    port: Annotated[int, doc("Port to listen on; 0 = any free one", is_common=True)] = 8000
    uds: Annotated[str | None, doc("Unix socket to listen on instead")] = None
    root_path: Annotated[
        str,
        doc(
            "Path prefix of the server's URLs behind a proxy, such as /llm; the proxy may remove it"
        ),
    ] = ""
    api_server_count: Annotated[
        int,
        doc(
            "Number of API processes, which share the address and the engines",
            is_common=True,
            least=1,
        ),
    ] = 1
    headless: Annotated[
        bool, doc("Run only the ranks or engines of this host, for the server of another one")
    ] = False
    # access
    api_key: Annotated[
        list[str] | None,
        doc(
            "API keys that clients may send; default: PEGBOARD_API_KEY or VLLM_API_KEY",
            is_common=True,
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        doc(
            "Private key for HTTPS (PEM file); default: read from ssl_certfile",
            needs="ssl_certfile",
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        doc("Certificate chain (PEM file); if given, the server uses HTTPS", is_common=True),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        doc(
            "Certificate authorities that sign client certificates (PEM file)", needs="ssl_certfile"
        ),
    ] = None
    ssl_cert_reqs: Annotated[
        int, doc("Client certificates: 0 = none, 1 = optional, 2 = required", needs="ssl_certfile")
    ] = 0
    ssl_ciphers: Annotated[
        str | None,
        doc("Cipher suites in OpenSSL's notation (TLS 1.2 and below)", needs="ssl_certfile"),
    ] = None
    enable_ssl_refresh: Annotated[
        bool, doc("Reload the key and certificates when their files change", needs="ssl_certfile")
    ] = False
    allowed_origins: Annotated[
        list[str], doc("CORS: allowed origins of web pages, * = any; default: none")
    ] = []
    allowed_methods: Annotated[list[str], doc("CORS: allowed methods", needs="allowed_origins")] = (
        msgspec.field(default_factory=lambda: ["*"])
    )
    allowed_headers: Annotated[
        list[str], doc("CORS: allowed request headers", needs="allowed_origins")
    ] = msgspec.field(default_factory=lambda: ["*"])
    allow_credentials: Annotated[
        bool, doc("CORS: allow cookies and credentials", needs="allowed_origins")
    ] = False
    middleware: Annotated[
        list[str], doc("ASGI middleware around the whole server, as package.module.Name")
    ] = []
    # logging
    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug", "trace"],
        doc("Log level of the HTTP server"),
    ] = "info"
    log_config_file: Annotated[
        str | None,
        doc("JSON or YAML file with a logging configuration (logging.config.dictConfig)"),
    ] = None
    disable_access_log: Annotated[bool, doc("Do not write a log line for each HTTP request")] = (
        False
    )
    disable_access_log_for_endpoints: Annotated[
        list[str], doc("Paths that are not logged, such as /health,/metrics")
    ] = []
    log_error_stack: Annotated[
        bool, doc("Log the traceback of every error answer, also of those that the client caused")
    ] = False
    enable_log_requests: Annotated[bool, doc("Log every generation request", is_common=True)] = (
        False
    )
    enable_log_outputs: Annotated[
        bool,
        doc("Log the generated outputs; needs enable_log_requests", needs="enable_log_requests"),
    ] = False
    max_log_len: Annotated[
        int | None,
        doc("Maximum characters or ids per prompt or output in the log; default: all", least=1),
    ] = None
    # responses
    enable_request_id_headers: Annotated[bool, doc("Send X-Request-Id")] = False
    enable_prompt_tokens_details: Annotated[
        bool, doc("Report the number of cached prompt tokens in usage")
    ] = False
    enable_force_include_usage: Annotated[bool, doc("Send usage at the end of every stream")] = (
        False
    )
    trust_request_chat_template: Annotated[bool, doc("Accept chat templates from requests")] = False
    trust_request_mm_kwargs: Annotated[
        bool, doc("Accept mm_processor_kwargs from requests, which may ask for much work")
    ] = False
    enable_auto_tool_choice: Annotated[
        bool, doc("Parse tool calls in answers to requests with tool_choice auto")
    ] = True
    exclude_tools_when_tool_choice_none: Annotated[
        bool, doc("Do not show tools to the model if tool_choice is none")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, doc("Name tokens token_id:N in logprobs unless a request forbids it")
    ] = False
    response_role: Annotated[str, doc("Role of generated messages")] = "assistant"
    # LoRA adapters
    lora_modules: Annotated[
        list[Any] | None,
        doc("LoRA adapters that clients may use, as name=path or JSON with name and path"),
    ] = None
    lora_resolvers: Annotated[
        list[str] | None,
        doc(
            "LoRA resolver plugins, in the order in which they are asked; default: those that "
            "have options"
        ),
    ] = None
    lora_base_models: Annotated[
        list[str],
        doc(
            "More names that adapters may record for the base model if a resolver finds them; * = "
            "any"
        ),
    ] = []
    lora_resolver_wait_s: Annotated[
        float, doc("Seconds that a request waits for LoRA resolvers", least=0)
    ] = 30.0
    # limits
    max_body_bytes: Annotated[int, doc("Largest request body", least=1)] = 8 * 1024 * 1024
    max_upload_bytes: Annotated[
        int, doc("Largest request body with a recording to transcribe", least=1)
    ] = 25 * 1024 * 1024
    max_prompts_per_request: Annotated[
        int, doc("Maximum number of prompts in one completion request", least=1)
    ] = 1024
    max_running_requests: Annotated[
        int, doc("Maximum number of HTTP requests handled at once; more are refused (503)", least=1)
    ] = 16384
    h11_max_incomplete_event_size: Annotated[
        int, doc("Maximum size of a request's head in bytes", least=1)
    ] = 64 * 1024
    h11_max_header_count: Annotated[int, doc("Maximum number of headers in a request", least=1)] = (
        256
    )
    shutdown_timeout_s: Annotated[
        float, doc("Seconds that running requests have to finish when the server stops", least=0)
    ] = 5.0
    engine_stall_s: Annotated[
        float, doc("Seconds that a step may take before /health answers 503", least=0)
    ] = 60.0
    engine_end_s: Annotated[
        float, doc("Seconds that a step may take before the engine is ended", least=0)
    ] = 300.0
    plugin_call_s: Annotated[
        float,
        doc(
            "Seconds that a request's plugin code may block the server before it is ended", least=0
        ),
    ] = 10.0


def check_server(config: ServerConfig) -> None:
    """Raise ConfigError for server values that are out of range or cannot work together."""
    check("server", config)
    if config.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError(
            "ssl_cert_reqs must be 0 (none), 1 (optional) or 2 (required), got "
            f"{config.ssl_cert_reqs}"
        )
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise ConfigError(
            "ssl_cert_reqs needs ssl_ca_certs, the authorities that client certificates are "
            "checked against"
        )

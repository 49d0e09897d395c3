"""The HTTP server around the API plugins: gateway, listening socket, TLS, access log, API
processes, and the command `serve`."""

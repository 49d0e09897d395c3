"""Routes for operators: the health of the server, its settings, its plugins and its API
description."""

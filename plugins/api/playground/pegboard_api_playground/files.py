"""The files of the page. Only these are served."""

from __future__ import annotations

MODULES = (
    "api",
    "chat",
    "composer",
    "dialogs",
    "dom",
    "limits",
    "main",
    "markdown",
    "message",
    "messages",
    "panels",
    "plugins",
    "requests",
    "settings",
    "sidebar",
    "sse",
    "store",
    "theme",
    "tokens",
    "tools",
    "transfer",
)
"""The page's own JavaScript modules."""

LIBRARIES = ("highlight", "marked", "purify")
"""Libraries of others, each with its licence."""

FILES = (
    "index.html",
    "icon.svg",
    "style.css",
    "content.css",
    *(f"js/{name}.js" for name in MODULES),
    *(f"vendor/{name}.js" for name in LIBRARIES),
    *(f"vendor/{name}.LICENSE.txt" for name in LIBRARIES),
)
"""Paths below the folder `static`, and below /playground/."""

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
"""Ending of a file's name → media type."""

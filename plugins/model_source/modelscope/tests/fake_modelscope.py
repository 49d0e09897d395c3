"""A server on this machine that answers like the few parts of ModelScope's API that the source
uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

Files = dict[str, bytes]
TOKEN = "right"


class FakeModelScope:
    """repositories: name → revision → files by name. private: names that need `TOKEN`. reads: the
    files that were read, as (revision, name). headers: of the last request. status: answers every
    request if it is not 0. damaged: the names of files whose content is wrong."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Files]] = {}
        self.private: set[str] = set()
        self.reads: list[tuple[str, str]] = []
        self.headers: dict[str, str] = {}
        self.status = 0
        self.damaged: set[str] = set()

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.headers = headers
        if self.status:
            return self.status, b'{"Message": "out of order"}'
        _, api, version, kind, *rest = url.path.split("/")
        if (version, kind) != ("v1", "models"):
            return 404, b"{}"
        name = "/".join(rest[:2])
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            return 401, b'{"Code": 10010103009, "Message": "invalid token"}'
        if name not in self.repositories or (name in self.private and not token):
            return 404, b'{"Code": 10010205001, "Message": "no such model"}'
        revisions = self.repositories[name]
        if api == "openapi":
            return 200, json.dumps({"success": True, "data": {"id": name}}).encode()
        if rest[2:] == ["revisions"]:
            branches = [{"Revision": one} for one in revisions]
            return 200, json.dumps({"Data": {"RevisionMap": {"Branches": branches}}}).encode()
        files = revisions.get(query["Revision"])
        if files is None:
            return 404, b'{"Code": 10010205002, "Message": "no such revision"}'
        if rest[2:] == ["repo", "files"]:
            listed = [
                {
                    "Path": path,
                    "Name": path.rpartition("/")[2],
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                }
                for path, content in files.items()
            ]
            folders = {path.rpartition("/")[0] for path in files} - {""}
            listed += [{"Path": path, "Type": "tree", "Size": 0} for path in folders]
            return 200, json.dumps({"Code": 200, "Data": {"Files": listed}}).encode()
        file = query["FilePath"]
        self.reads.append((query["Revision"], file))
        content = files[file]
        return 200, content[::-1] if file in self.damaged else content


@contextmanager
def serving(site: FakeModelScope) -> Iterator[str]:
    """Yield the URL of the server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            status, content = site.answer(self.path, headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

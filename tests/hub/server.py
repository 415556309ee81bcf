"""A small hub on 127.0.0.1 that speaks the endpoints which pushing to and loading from a repository use."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secretsecretsecretsecretsecret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The content of the hub, and what was asked of it."""

    url: str = ""
    user: str = "me"
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)  # name → file → content
    private: dict[str, bool] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # large files by their SHA-256
    requests: list[tuple[str, str]] = field(default_factory=list)
    claimed_sizes: dict[str, int] = field(default_factory=dict)  # file → a size that is not its own
    refuse: int = 0  # HTTP status for every request that writes


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """Run a hub until the end of the context."""
    hub = Hub()

    class Handler(_Handler):
        content = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    content: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("X_Length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, document: Any, status: int = 200) -> None:
        self._send(status, json.dumps(document).encode(), Content_Type="application/json")

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is not None:
            return self.rfile.read(int(length))
        body = b""  # chunked
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _start(self) -> str:
        path = self.path.partition("?")[0]
        self.content.requests.append((self.command, path))
        return path

    def _may_write(self) -> bool:
        status = self.content.refuse
        if not status and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status = 401
        if status:
            self._json({"error": "no"}, status)
        return not status

    # Reading.

    def do_HEAD(self) -> None:
        self._file(self._start())

    def do_GET(self) -> None:
        path = self._start()
        if path == "/api/whoami-v2":
            if self._may_write():
                self._json({"name": self.content.user, "type": "user"})
        elif found := re.fullmatch(r"/api/models/(.+)/revision/\w+", path):
            files = self.content.repositories.get(found[1])
            if files is None:
                self._send(404, X_Error_Code="RepoNotFound")
            else:
                self._json({"id": found[1], "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]})
        else:
            self._file(path)

    def _file(self, path: str) -> None:
        found = re.fullmatch(r"/(.+)/resolve/(\w+)/(.+)", path)
        if not found or found[1] not in self.content.repositories:
            self._send(404, X_Error_Code="RepoNotFound")
            return
        content = self.content.repositories[found[1]].get(found[3])
        if content is None:
            self._send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            return
        size = self.content.claimed_sizes.get(found[3], len(content))
        digest = hashlib.sha256(content).hexdigest()
        self._send(200, content, ETag=f'"{digest}"', X_Repo_Commit=COMMIT, X_Linked_Size=str(size))

    # Writing.

    def do_POST(self) -> None:
        path, body = self._start(), self._body()
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
            return
        if not self._may_write():
            return
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or self.content.user}/{asked['name']}"
            if name in self.content.repositories:
                self._json({"error": "exists", "url": f"{self.content.url}/{name}"}, 409)
                return
            self.content.repositories[name] = {}
            self.content.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            self._json({"url": f"{self.content.url}/{name}", "name": name})
        elif re.fullmatch(r"/api/models/.+/preupload/main", path):
            files = [f["path"] for f in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            answers = [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]
            self._json({"files": answers})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [
                {**o, "actions": {"upload": {"href": f"{self.content.url}/store/{o['oid']}"}}}
                for o in objects
            ]
            self._json({"transfer": "basic", "objects": upload})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            files = self.content.repositories[found[1]]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.content.stored[value["oid"]]
            self._json(
                {
                    "success": True,
                    "commitUrl": f"{self.content.url}/{found[1]}/commit/{COMMIT}",
                    "commitOid": COMMIT,
                    "hookOutput": "",
                }
            )
        elif found := re.fullmatch(r"/api/models/(.+)/paths-info/main", path):
            files = self.content.repositories[found[1]]
            sizes = {name: self.content.claimed_sizes.get(name, len(c)) for name, c in files.items()}
            self._json([{"type": "file", "path": n, "size": s, "oid": "0" * 40} for n, s in sizes.items()])
        else:
            self._send(404)

    def do_PUT(self) -> None:
        path, body = self._start(), self._body()
        digest = path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == digest
        self.content.stored[digest] = body
        self._send(200)

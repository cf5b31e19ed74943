"""A small hub on this machine: repositories in memory, with the requests that huggingface_hub makes."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"


@dataclass
class Hub:
    """``repos``: name -> file -> content. ``private``: names that only the holder of TOKEN sees."""

    address: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        """The tests read `Hub.requests` instead."""

    def do_HEAD(self) -> None:
        self._get(with_body=False)

    def do_GET(self) -> None:
        self._get(with_body=True)

    def _get(self, *, with_body: bool) -> None:
        parts = self._begin()
        if parts[:2] == ["api", "models"]:
            files = self._visible("/".join(parts[2:4]))
            if files is not None:
                shown = [{"rfilename": name} for name in files]
                name = "/".join(parts[2:4])
                facts = {"id": name, "modelId": name, "sha": COMMIT, "private": name in self.hub.private}
                self._answer(200, {**facts, "siblings": shown})
        elif "resolve" in parts:
            files, name = self._visible("/".join(parts[:2])), "/".join(parts[4:])
            if files is None:
                return
            if name not in files:
                self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
                return
            tag = hashlib.sha256(files[name]).hexdigest()
            self._answer(
                200,
                files[name] if with_body else b"",
                {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'},
                length=len(files[name]),
            )
        else:
            self._answer(404, {"error": "not here"})

    def do_POST(self) -> None:
        parts = self._begin()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            is_private = asked.get("private") or asked.get("visibility") == "private"  # by the library's version
            if name not in self.hub.repos and is_private:
                self.hub.private.add(name)
            self.hub.repos.setdefault(name, {})
            self._answer(200, {"url": f"{self.hub.address}/{name}", "name": name})
        elif parts == ["api", "validate-yaml"]:
            self._answer(200, {"errors": [], "warnings": []})
        elif "preupload" in parts:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self._answer(200, {"files": [{**file, "shouldIgnore": False} for file in files]})
        else:
            assert "commit" in parts, parts
            name = "/".join(parts[2:4])
            repo = self.hub.repos[name]
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    repo[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self._answer(200, {"commitUrl": f"{self.hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def _begin(self) -> list[str]:
        path = unquote(urlparse(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path.strip("/").split("/")

    def _visible(self, name: str) -> dict[str, bytes] | None:
        may_see = name not in self.hub.private or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if name in self.hub.repos and may_see:
            return self.hub.repos[name]
        self._answer(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return None

    def _answer(
        self, status: int, content: object, headers: dict[str, str] | None = None, *, length: int | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

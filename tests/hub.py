"""A stand-in for the Hugging Face Hub on 127.0.0.1: enough of its HTTP API to take an upload, and to refuse one.

Large files come by LFS, or by xet, whose client asks for a write token, offers blocks of chunks ("xorbs") under their
hash, and last a table of which file is which chunks ("shard"). What xet stores is packed; of such a file the stand-in
keeps the SHA-256 that the commit names, and how many bytes came in blocks.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_good"


@dataclass
class Hub:
    """What the stand-in holds: repositories by name, each with its files, and whether it is private.

    fail: start of a request's path -> statuses with which to answer the next such requests; 0 cuts the connection
    """

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    xorb_bytes: int = 0
    shards: int = 0
    refuse_commits: int = 0
    fail: dict[str, list[int]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve an empty Hub for as long as the context lasts."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Silence: a test's output is its own."""

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0].strip("/")
        self.hub.requests.append(f"{self.command} {path}")
        failures = next((left for start, left in self.hub.fail.items() if path.startswith(start) and left), None)
        if failures:
            status = failures.pop(0)
            self.close_connection = True
            if status:
                self._answer(status, {"error": "the stand-in fails"}, {"Retry-After": "0"})
        elif path.startswith(("v1/", "v2/")):
            self._xet(path, body)
        elif path.startswith("blobs/"):
            self.hub.blobs[path.removeprefix("blobs/")] = body
            self._answer(200, {})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif path == "api/repos/create":
            self._create(json.loads(body))
        elif path.startswith("api/models/"):
            owner, name, *rest = path.removeprefix("api/models/").split("/")
            self._model(f"{owner}/{name}", rest, body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._lfs_batch(json.loads(body))
        else:
            self._answer(404, {"error": f"not part of this stand-in: {path}"})

    def _create(self, wanted: dict[str, Any]) -> None:
        repository = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if repository.startswith("theirs/"):
            self._answer(403, {"error": "You don't have the rights to create a model under the namespace theirs"})
        elif repository in self.hub.files:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repository}"})
        else:
            self.hub.files[repository] = {}
            self.hub.private[repository] = bool(wanted.get("private") or wanted.get("visibility") == "private")
            self._answer(200, {"url": f"{self.hub.url}/{repository}", "name": repository})

    def _xet(self, path: str, body: bytes) -> None:
        if path.startswith("v1/chunks/"):
            self._answer(404, {"error": "no such chunk"})
        elif path.startswith("v1/xorbs/"):
            self.hub.xorb_bytes += len(body)
            self._answer(200, {"was_inserted": True})
        elif path == "v1/shards":
            self.hub.shards += 1
            self._answer(200, {"result": 1})
        else:
            self._answer(404, {"error": f"not part of this stand-in: {path}"})

    def _model(self, repository: str, rest: list[str], body: bytes) -> None:
        if repository not in self.hub.files:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif not rest or rest[0] == "revision":
            self._answer(
                200, {"id": repository, "sha": "0" * 40, "private": self.hub.private[repository], "siblings": []}
            )
        elif rest[0].startswith("xet-write-token"):
            self._answer(200, {"casUrl": self.hub.url, "accessToken": "xet", "exp": 4102444800})
        elif rest[0] == "tree":
            held = self.hub.files[repository]
            self._answer(
                200,
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in held.items()
                ],
            )
        elif rest[0] == "preupload":
            self._answer(
                200,
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                            "shouldIgnore": False,
                        }
                        for file in json.loads(body)["files"]
                    ]
                },
            )
        elif self.hub.refuse_commits:
            self._answer(self.hub.refuse_commits, {"error": "the commit is refused"})
        else:
            self._commit(repository, [json.loads(line) for line in body.splitlines()])

    def _lfs_batch(self, wanted: dict[str, Any]) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/blobs/{each['oid']}"}}}
            for each in wanted["objects"]
        ]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        held = self.hub.files[repository]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                held[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                blob = self.hub.blobs.get(value["oid"])
                assert self.hub.shards if blob is None else hashlib.sha256(blob).hexdigest() == value["oid"]
                held[value["path"]] = f"xet:{value['oid']}".encode() if blob is None else blob
            elif line["key"] == "deletedFile":
                del held[value["path"]]
        self._answer(
            200, {"commitUrl": f"{self.hub.url}/{repository}/commit/{'1' * 40}", "commitOid": "1" * 40, "success": True}
        )

    def _answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

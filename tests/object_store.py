"""A real S3 server (moto's) in a process of its own on the loopback, and a proxy before it that misbehaves."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import md5
from typing import Any

import pytest

from milepost.checkpoint.remote import folder as remote_module

BUCKET = "runs"
PAGE = 7
"""Keys on a page of a listing: a real server's 1,000 are as many requests for a test."""
CUT = b""
_HOST = "127.0.0.1"
_REQUEST = re.compile(rb"(GET|PUT|POST|DELETE|HEAD) [^\r\n]* HTTP/1\.1\r\n")

Answer = Callable[[str], bytes | None]


class FaultyProxy:
    """Passes TCP connections on to a port of this machine.

    cut_after:  cut every connection once so many more bytes have gone up over all of them; None: never
    stall_after: set `stalled` then, likewise
    stalled:    pass nothing on while this is set
    cuts:       connections that were cut
    answer:     asked before a request is passed on, with its first line: what the client gets in place of the server's
                answer, `CUT` for a broken connection, None for what the server says
    alter:      what becomes of bytes that the server says, as many as they were; `CUT`: the connection breaks there
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self.stalled = threading.Event()
        self.cuts = 0
        self.heal()
        self._server = socket.create_server((_HOST, 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def heal(self) -> None:
        """Misbehave no more."""
        self.cut_after: int | None = None
        self.stall_after: int | None = None
        self.answer: Answer = lambda line: None
        self.alter: Callable[[bytes], bytes] = lambda data: data
        self.stalled.clear()

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((_HOST, self._target))
            except OSError:
                client.close()
                continue
            for pass_on in (self._pass_up, self._pass_down):
                threading.Thread(target=pass_on, args=(client, server), daemon=True).start()

    def _pass_up(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                request = _REQUEST.match(data)
                said = self._asked(request[0].decode().strip()) if request else None
                if said:
                    client.sendall(said.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if data[:4] == b"HEAD" else said)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(1 << 16):
                        continue
                if said is not None or self._is_cut(len(data)):
                    break
                self._stall()
                server.sendall(data)
        except OSError:
            pass  # the other side is gone, as this one now is
        _end(client, server)

    def _pass_down(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                self._stall()
                altered = self.alter(data)
                client.sendall(altered)
                if len(altered) < len(data):
                    break
        except OSError:
            pass
        _end(client, server)

    def _asked(self, line: str) -> bytes | None:
        with self._asking:
            return self.answer(line)

    def _stall(self) -> None:
        while self.stalled.is_set():
            time.sleep(0.02)

    def _is_cut(self, count: int) -> bool:
        with self._lock:
            if self.stall_after is not None:
                self.stall_after -= count
                if self.stall_after < 0:
                    self.stall_after = None
                    self.stalled.set()
            if self.cut_after is None:
                return False
            self.cut_after -= count
            if self.cut_after >= 0:
                return False
            self.cuts += 1
            return True


def _end(*connections: socket.socket) -> None:
    for one in connections:
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def refusal(status: str, code: str, message: str) -> bytes:
    """What S3 says in place of what it was asked for: `status` is that of HTTP, "503 Slow Down"."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"{head}\r\n{body}".encode()


@dataclass
class ObjectStore:
    """A running server with an empty bucket, and what clients need to find the proxy before it."""

    port: int
    proxy: FaultyProxy
    environment: dict[str, str] = field(default_factory=dict)

    @cached_property
    def client(self) -> Any:
        """Past the proxy."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=f"http://{_HOST}:{self.port}", aws_access_key_id="test", aws_secret_access_key="test",
            region_name="us-east-1",
        )  # fmt: skip

    def put_back(self, folder: str, objects: Mapping[str, bytes]) -> None:
        """Let a folder of the bucket hold these objects, by their names in it, and no others."""
        wanted, there = tags(objects), self.tags(folder)
        for name in there.keys() - wanted.keys():
            self.client.delete_object(Bucket=BUCKET, Key=f"{folder}/{name}")
        for name, data in objects.items():
            if there.get(name) != wanted[name]:
                self.client.put_object(Bucket=BUCKET, Key=f"{folder}/{name}", Body=data)

    def tags(self, folder: str) -> dict[str, str]:
        """The objects of a folder of the bucket, by their names in it: the MD5 of each, which S3 calls its ETag."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{folder}/")
        return {
            str(one["Key"]).removeprefix(f"{folder}/"): str(one["ETag"]).strip('"')
            for page in pages
            for one in page.get("Contents", [])
        }

    def pending(self, url: str) -> list[str]:
        """Multipart uploads below a folder that were begun and neither completed nor given up: names in it."""
        prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
        keys = [one["Key"] for one in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]
        return [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]


def tags(objects: Mapping[str, bytes]) -> dict[str, str]:
    """What `ObjectStore.tags` says of a folder that holds these objects."""
    return {name: md5(data, usedforsecurity=False).hexdigest() for name, data in objects.items()}


@contextmanager
def quick_retries(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server's address in the environment, parts as small as S3 takes them, quick retries, and a network that is
    unhurt at the beginning and the end."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_module, "PART", 5 << 20)
    made = remote_module.Remote.__init__

    def quick(self: remote_module.Remote, url: str, **options: Any) -> None:
        made(self, url, **{"wait": 0.01, "timeout": 2.0, **options})
        self._fs.retries = 1  # s3fs's own tries, which grow long

    monkeypatch.setattr(remote_module.Remote, "__init__", quick)
    server.proxy.heal()
    server.client.create_bucket(Bucket=BUCKET)
    yield
    server.proxy.heal()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start both; the server keeps everything in its memory and ends with the context."""
    from s3fs import S3FileSystem

    with socket.create_server((_HOST, 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-c", f"from moto.server import main; main(['-H', '{_HOST}', '-p', '{port}'])"]
    few = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=few)
    proxy = FaultyProxy(port)
    S3FileSystem.clear_instance_cache()  # whose connections know another port
    try:
        _await(port, server)
        environment = {
            "AWS_ENDPOINT_URL": f"http://{_HOST}:{proxy.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": _HOST,
            "no_proxy": _HOST,
        }
        yield ObjectStore(port, proxy, environment)
    finally:
        proxy.close()
        server.terminate()
        server.wait(10)


def _await(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection((_HOST, port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("the S3 server did not start")

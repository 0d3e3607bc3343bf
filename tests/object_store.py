"""A real S3 server (moto's) in a process of its own on the loopback, and a proxy before it that cuts and stalls."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

BUCKET = "runs"
_HOST = "127.0.0.1"


class FaultyProxy:
    """Passes TCP connections on to a port of this machine.

    cut_after:  cut every connection once so many more bytes have gone up over all of them; None: never
    stall_after: set `stalled` then, likewise
    stalled:    pass nothing on while this is set
    cuts:       connections that were cut
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._lock = threading.Lock()
        self.cut_after: int | None = None
        self.stall_after: int | None = None
        self.stalled = threading.Event()
        self.cuts = 0
        self._server = socket.create_server((_HOST, 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

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
            for source, target, up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass_on, args=(source, target, up), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if up and self._is_cut(len(data)):
                    break
                while self.stalled.is_set():
                    time.sleep(0.02)
                target.sendall(data)
        except OSError:
            pass  # the other side is gone, as this one now is
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

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


@dataclass
class ObjectStore:
    """A running server with an empty bucket; `through` is the address that clients use, the proxy's."""

    port: int
    proxy: FaultyProxy
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def through(self) -> str:
        return f"http://{_HOST}:{self.proxy.port}"


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start both; the server keeps everything in its memory and ends with the context."""
    with socket.create_server((_HOST, 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-c", f"from moto.server import main; main(['-H', '{_HOST}', '-p', '{port}'])"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    proxy = FaultyProxy(port)
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

"""Storage to test URLs with: an S3 server in a process of its own, and a file system whose uses are counted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.processes import free_port, wait_until

SECRET_KEY = "a-secret-that-nobody-may-see"


class ShelfFileSystem(LocalFileSystem):
    """``shelf:///folder/file`` is the local file, seen as a remote one. Shared by processes, as no memory:// is.

    Each fetch adds a line to ``LOG``; the first ``FAULTS`` fetches meet a broken connection.
    """

    protocol = "shelf"
    LOG: Path | None = None
    FAULTS = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("shelf://").rstrip("/") or "/"

    def get_file(self, rpath: str, lpath: Any, **options: Any) -> None:
        fetched = 0
        if self.LOG is not None:
            with open(self.LOG, "a+") as log:
                log.write(f"{os.path.basename(rpath)}\n")
                log.seek(0)
                fetched = len(log.readlines())
        if fetched <= self.FAULTS:
            raise ConnectionResetError("https://user:pw@storage/a?X-Amz-Signature=hidden went away")
        time.sleep(0.02)  # so that two who come at once would both fetch
        with open(self._strip_protocol(rpath), "rb") as source, open(lpath, "wb") as target:
            target.write(source.read())


fsspec.register_implementation("shelf", ShelfFileSystem, clobber=True)


@contextmanager
def s3_server() -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """A real S3 server on a port of its own (moto's): the environment that leads there, and its process."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: server.poll() is not None or answers(port))
        assert server.poll() is None, "the S3 server did not start; is moto[server] installed?"
        yield (
            {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            },
            server,
        )
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0

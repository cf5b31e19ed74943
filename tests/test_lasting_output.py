"""Streams whose reader is gone; whole runs without readers are in ``training/test_closed_output.py``."""

from __future__ import annotations

import os
import sys

import pytest

from tinyvae.terminal import LastingStream, outlive_readers


def test_a_stream_without_a_reader_takes_everything(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        lasting = LastingStream(stream)
        print("heard", file=lasting)
        assert os.read(reader, 100) == b"heard\n"
        os.close(reader)
        for _ in range(3):
            print("lost", file=lasting, flush=True)
        os.write(writer, b"a C library's words\n")
    (record,) = caplog.records
    assert "can no longer be written (Broken pipe); the run goes on" in record.getMessage()


def test_the_standard_streams_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stderr
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    outlive_readers()
    wrapped = sys.stderr
    outlive_readers()
    assert sys.stderr is wrapped and isinstance(wrapped, LastingStream)
    assert wrapped.encoding == before.encoding and wrapped.isatty() == before.isatty()

"""The page in a real browser: a drawn example and a real video through it, with the same numbers as our own codec."""

from __future__ import annotations

import base64
import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import WriteVideo
from tests.engines.small_models import small
from tests.evaluation.browser import Page, open_browser
from tinyvae import TAEHV
from tinyvae.convert.export import export
from tinyvae.convert.web import find_runtime
from tinyvae.errors import UserError

pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
pytestmark = pytest.mark.slow
DONE = "return document.documentElement.dataset.done === 'true' || shown.fault"
PHONE, DESKTOP = 390, 1200
PICTURES = os.environ.get("TINYVAE_PAGE_PICTURES")
"""A folder for screenshots, to look at them."""


@pytest.fixture(scope="module", autouse=True)
def runtime() -> None:
    try:
        find_runtime()
    except UserError as missing:
        pytest.skip(str(missing))


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def open_page(page: Page, address: str, *, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    page.command("Emulation.setDeviceMetricsOverride", **metrics)
    page.call("url", url=address)
    page.wait("return document.documentElement.dataset.ready === 'true' || window.shown?.fault")
    assert not page.run("return shown.fault"), page.run("return shown.fault")


def picture(page: Page, name: str, width: int) -> None:
    if PICTURES:
        height = page.run("return document.documentElement.scrollHeight")
        page.screenshot(Path(PICTURES) / name, width=width, top=0, height=height)


def set_values(page: Page, **values: object) -> None:
    for name, value in values.items():
        page.run("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))


def read_frames(page: Page, name: str) -> torch.Tensor:
    """The page's own frames 1TCHW in [0, 1], before the canvas rounds them: ``frames`` or ``decoded``."""
    script = """
        const text = (planes) => {
            let made = "";
            for (const value of new Uint8Array(planes.buffer)) made += String.fromCharCode(value);
            return btoa(made);
        };
        return [shown.height, shown.width, shown[arguments[0]].map(text)];
    """
    height, width, texts = page.run(script, name)
    frames = [np.frombuffer(base64.b64decode(text), np.float32).reshape(3, height, width) for text in texts]
    return torch.from_numpy(np.stack(frames))[None]


def assert_same_as_codec(page: Page, model: TAEHV, *, tolerance: float = 1e-4) -> None:
    frames, decoded = read_frames(page, "frames"), read_frames(page, "decoded")
    expected = model.decode_video(model.encode_video(frames))[:, : frames.shape[1]]
    torch.testing.assert_close(decoded, expected, atol=tolerance, rtol=0)


def number_of_colors(page: Page, canvas: str) -> int:
    script = """
        const c = document.getElementById(arguments[0]);
        const data = new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer);
        return new Set(data).size;
    """
    return page.run(script, canvas)


@pytest.mark.parametrize(("variant", "width"), [("taehv", DESKTOP), ("taecvx", PHONE), ("taeh3", PHONE)])
def test_the_drawn_example(tmp_path: Path, variant: str, width: int) -> None:
    model = small(variant)
    export(model, to="web", output=tmp_path)
    with serve(tmp_path) as address, open_browser() as page:
        open_page(page, address, width=width)
        set_values(page, width=64, fps=12, seconds=1.5)
        page.run("document.getElementById('example').click()")
        page.wait(DONE)
        assert_same_as_codec(page, model)  # 18 frames: one more than a chunk of taeh3, than whole latents
        colors = {canvas: number_of_colors(page, canvas) for canvas in ("original", "latents", "decoded")}
        assert min(colors.values()) > 20, colors
        rows = page.run("return [...document.querySelectorAll('#rates td')].map((cell) => cell.textContent)")
        assert rows[:2] == ["pixels, 8 bit", f"{3 * page.run('return shown.height') * 64 * 12:,}"]
        assert " dB." in page.run("return document.getElementById('quality').textContent")
        picture(page, f"{variant}.png", width)
        assert page.complaints() == []
        assert page.run("return document.documentElement.scrollWidth") <= width, "nothing sticks out"


def test_a_video_file_in_half_precision(tmp_path: Path, write_video: WriteVideo) -> None:
    model = small("taew2_2")
    export(model, to="web", output=tmp_path / "page", dtype="float16")
    video = write_video("a.mp4", frames=24, height=64, width=96, fps=12)
    with serve(tmp_path / "page") as address, open_browser() as page:
        open_page(page, address, width=DESKTOP)
        set_values(page, width=64, fps=6, seconds=1)
        put_file(page, "file", video)
        page.wait(DONE)
        assert_same_as_codec(page, model, tolerance=2e-2)
        assert page.run("return shown.frames.length") == 6
        assert (read_frames(page, "frames")[0, 0] - read_frames(page, "frames")[0, 5]).abs().max() > 0.1, "it moves"
        again = "const field = document.getElementById('file'); field.onclick(); return field.files.length"
        assert page.run(again) == 0, "a browser tells of a chosen file only where the field changes"
        text = page.run("return document.getElementById('rates').textContent")
        assert "the video file, at its own size" in text
        picture(page, "video.png", DESKTOP)
        assert page.complaints() == []


def test_an_int8_decoder(tmp_path: Path, write_video: WriteVideo) -> None:
    model = small("taehv").requires_grad_(False)
    done = export(model, to="web", output=tmp_path / "page", dtype="int8", data=write_video("a.mp4", frames=40))
    with serve(tmp_path / "page") as address, open_browser() as page:
        open_page(page, address, width=DESKTOP)
        set_values(page, width=64, fps=12, seconds=1)
        page.run("document.getElementById('example').click()")
        page.wait(DONE)
        frames, decoded = read_frames(page, "frames"), read_frames(page, "decoded")
        expected = model.decode_video(model.encode_video(frames))[:, : frames.shape[1]]
        error = (decoded - expected).square().mean().item()
        assert 0 < error < 10 ** -(35 / 10), (error, done.rounding_db)
        assert page.complaints() == []


def test_what_is_no_video_is_said(tmp_path: Path) -> None:
    export(small("taehv"), to="web", output=tmp_path / "page")
    (tmp_path / "notes.mp4").write_text("no video")
    with serve(tmp_path / "page") as address, open_browser() as page:
        open_page(page, address, width=PHONE)
        put_file(page, "file", tmp_path / "notes.mp4")
        page.wait("return document.getElementById('status').classList.contains('wrong')")
        said = page.run("return document.getElementById('status').textContent")
        assert said == "Something went wrong: this browser cannot play notes.mp4"
        assert page.run("return document.getElementById('example').disabled") is False


def test_a_fault_of_the_worker_ends_the_work(tmp_path: Path, write_video: WriteVideo) -> None:
    """The video is closed, and the next one goes through."""
    model = small("taehv")
    export(model, to="web", output=tmp_path / "page")
    with serve(tmp_path / "page") as address, open_browser() as page:
        open_page(page, address, width=PHONE)
        page.run("""
            window.numClosed = 0;
            URL.revokeObjectURL = () => { window.numClosed += 1; };
            document.getElementById("width").append(new Option("60", "60"));
        """)
        set_values(page, width=60, fps=12, seconds=1)  # no multiple of the space factor
        put_file(page, "file", write_video("a.mp4", frames=12, height=64, width=64, fps=12))
        page.wait("return document.getElementById('status').classList.contains('wrong')")
        page.wait("return window.numClosed === 1")
        assert "Something went wrong" in page.run("return document.getElementById('status').textContent")
        set_values(page, width=64)
        page.run("document.getElementById('example').click()")
        page.wait(DONE)
        assert_same_as_codec(page, model)


def put_file(page: Page, field: str, file: Path) -> None:
    (element,) = page.call("element", using="css selector", value=f"#{field}").values()
    page.call(f"element/{element}/value", text=str(file))

"""The examples run as they stand: scripts, the settings file, the command that tells how a run ended."""

from __future__ import annotations

import http.server
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.processes import HANGS_S
from tinyvae.cli.main import run
from tinyvae.config import load_config
from tinyvae.data.sample_clips import write_sample_clips

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "my_settings.py"
EXAMPLES = sorted(file for file in SETTINGS.parent.glob("*.py") if file != SETTINGS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_settings_file_is_right_as_it_stands() -> None:
    loaded = load_config(SETTINGS)
    assert loaded.config.output_dir == ROOT / "output" / "mine_%Y-%m-%d_%H-%M-%S", "a start gets a folder of its own"
    assert not loaded.notices, "nothing is decided for the user"


@pytest.mark.slow
def test_the_settings_file_trains_and_goes_on(tmp_path: Path) -> None:
    """The two lines of the README, at a size that a CPU can do."""
    write_sample_clips(tmp_path / "videos", count=6, height=64, width=64, frames=20)
    words = (
        f"--data_root {tmp_path / 'videos'} --output_dir {tmp_path / 'output'}/%Y-%m-%d_%H-%M-%S --height 32 --width 32"
    )
    words += " --model_width 0.125 --train_batch_size 1 --validation_steps 0 --checkpointing_steps 2"
    words += " --report false --compile_model false --mixed_precision no --dataloader_num_workers 0 --train_split 0.8"
    start = ["train", str(SETTINGS), *words.split()]
    assert run([*start, "--max_train_steps", "2"]) == 0
    assert run([*start, "--max_train_steps", "4", "--resume", "latest"]) == 0
    (folder,) = (entry for entry in (tmp_path / "output").iterdir() if entry.is_dir() and not entry.is_symlink())
    assert {entry.name for entry in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


# notify.sh

REASON = 'the configuration has 2 mistakes:\n  - "a" is not a number'
EVENT = {
    "TINYVAE_EVENT": "failed",
    "TINYVAE_REASON": REASON,
    "TINYVAE_STEP": "40",
    "TINYVAE_MAX_STEPS": "100",
    "TINYVAE_METRIC": "psnr",
    "TINYVAE_BEST": "",
    "TINYVAE_BEST_STEP": "",
}


def notify(run_folder: Path, **more: str) -> None:
    env = {**os.environ, **EVENT, "TINYVAE_RUN": str(run_folder), **more}
    subprocess.run([ROOT / "examples" / "notify.sh"], env=env, check=True, timeout=HANGS_S)


def test_notify_writes_a_file(tmp_path: Path) -> None:
    notify(tmp_path)
    text = (tmp_path / "notifications.txt").read_text()
    assert text.startswith("tinyvae failed at step 40 of 100: the configuration has 2 mistakes")
    assert "best psnr: none yet" in text


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_notify_posts_json_to_a_webhook(tmp_path: Path) -> None:
    posted = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        notify(tmp_path, WEBHOOK=f"http://127.0.0.1:{server.server_port}/hook", NO_PROXY="127.0.0.1")
    assert REASON in posted[0]["text"] and not list(tmp_path.iterdir())


def test_notify_sends_mail(tmp_path: Path) -> None:
    mail = tmp_path / "bin" / "mail"
    mail.parent.mkdir()
    mail.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words; cat >{tmp_path}/text\n')
    mail.chmod(0o755)
    notify(tmp_path / "my_run", MAIL_TO="me@example.org", PATH=f"{mail.parent}:{os.environ['PATH']}")
    assert (tmp_path / "words").read_text().splitlines() == ["-s", "tinyvae failed: my_run", "me@example.org"]
    assert REASON in (tmp_path / "text").read_text()

"""`tinyvae` as processes of their own, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 150
STEPS = 6
EXACT = {"deterministic": True, "max_train_steps": STEPS, "validation_steps": 3, "checkpointing_steps": STEPS}


def text_of(settings: dict[str, object]) -> list[str]:
    """``--key value`` words."""
    words: list[str] = []
    for key, value in settings.items():
        words += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def start(words: list[str], *, log: Path, launcher: list[str] | None = None) -> subprocess.Popen[bytes]:
    """``tinyvae WORDS`` as a process of its own; everything it says goes to ``log``."""
    command = [*(launcher or [sys.executable]), "-m", "tinyvae.cli", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)


def run_ok(words: list[str], *, log: Path, launcher: list[str] | None = None) -> str:
    """Run to the end, which must be a success; what the command said."""
    code = start(words, log=log, launcher=launcher).wait(TIMEOUT_S)
    said = log.read_text(errors="replace")
    assert code == 0, f"exit code {code}\n{said[-4000:]}"
    return said

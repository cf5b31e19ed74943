"""The command line as a user meets it: its exit code, one sentence for a mistake, what a process loads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.conftest import WriteVideo
from tinyvae import TAEHV, save_model
from tinyvae.cli import info, train
from tinyvae.cli.main import VERBS, build_parser, main, run
from tinyvae.errors import UserError
from tinyvae.training.engine import LAUNCH_VARIABLES


def tinyvae(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinyvae", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_lists_and_help_and_wrong_settings_do_not_load_torch() -> None:
    """torch takes seconds to load; nobody should wait for it to read a help text, or what is wrong."""
    commands = [["--help"], ["info"], ["export", "--to", "list"], *([verb, "--help"] for verb in VERBS)]
    commands += [["train", "scratch", "--hight", "64"], ["check", "scratch", "--hight", "64", "--quick"]]
    program = f"""if True:
        import contextlib, sys
        from tinyvae.cli.main import run
        from tinyvae.errors import UserError
        for words in {commands!r}:
            with contextlib.suppress(SystemExit, UserError):
                run(words)
            assert 'torch' not in sys.modules, words
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {verb} " in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    text = build_parser(verb).format_help()
    assert "example:" in text and f"tinyvae {verb}" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inf"], "Did you mean 'info'"),
        (["info", "nothing.pth"], "there is no model at nothing.pth"),
        (["info", "taehv", "--variant", "taecvx"], "leave one out"),
        (["info", "taehv", "--frams", "5"], "unknown words: --frams 5. Did you mean '--frames'? `tinyvae info --help`"),
        (["info", "taehv", "more.pth"], "unknown words: more.pth. `tinyvae info --help` says what it takes"),
    ],
)
def test_mistakes_end_in_one_sentence_and_exit_code_2(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and says in said and said.startswith("tinyvae: error: ") and said.count("\n") == 1


def test_a_path_that_is_closed_to_the_user_is_told_by_each_verb(tmp_path: Path, write_video: WriteVideo) -> None:
    save_model(TAEHV("taehv", width=0.125), tmp_path / "m.safetensors")
    video, closed = str(write_video("videos/a.mp4", frames=5)), tmp_path / "closed"
    data, inside = ["--data_root", str(tmp_path / "videos")], str(closed / "it")
    closed.mkdir(mode=0o000)
    commands = [
        ["info", inside],
        ["eval", inside, "--data", video],
        ["reconstruct", "m.safetensors", inside, "--output", "x.mp4"],
        ["decode", "m.safetensors", inside],
        ["data", "index", inside, "--output", "x.tvi"],
        ["check", "quickstart", "--resume", inside, *data, "--quick"],
        ["train", "quickstart", "--resume", inside, *data],
        ["train", "distill", "--teacher", inside, *data],
        ["train", "distill", "--latent_store", inside, *data],
        ["latents", "distill", "--teacher", inside, *data, "--clips", "8", "--output", "store"],
        ["latents", "distill", "--teacher", "m.safetensors", *data, "--clips", "8", "--output", inside],
    ]
    program = f"""if True:
        from tinyvae.cli.main import run
        from tinyvae.errors import UserError
        for words in {commands!r}:
            try:
                run(words)
            except UserError as mistake:
                print(*words[:3], "->", mistake)
    """
    as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*as_others, sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if " -> " in line]
    assert len(told) == len(commands) and all("Permission denied" in line for line in told), done.stdout
    assert not (tmp_path / "output").exists()


def test_what_the_system_refuses_later_is_no_mistake_of_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto_recovery_train.sh starts it again after exit code 1, and not after 2."""

    def refuse(*path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", *path)

    for module in (info, train):
        monkeypatch.setattr(module, "run", lambda arguments: refuse("/storage/file"))
    with pytest.raises(PermissionError):
        run(["train"])
    with pytest.raises(UserError, match=r"^/storage/file is closed to you \(Permission denied\); check its perm"):
        run(["info"])
    monkeypatch.setattr(info, "run", lambda arguments: refuse())
    with pytest.raises(PermissionError):
        run(["info"])


def test_no_verb_shows_usage_and_fails() -> None:
    done = tinyvae()
    assert done.returncode == 2 and "usage: tinyvae VERB" in done.stdout


def test_train_alone_says_what_is_missing_and_lists_the_presets(tmp_path: Path) -> None:
    done = tinyvae("train", folder=tmp_path)
    assert done.returncode == 2 and "say what to train" in done.stderr and "tinyvae train quickstart" in done.stderr
    assert "\n  h100 " in done.stderr and "Traceback" not in done.stderr


def test_the_preset_of_train_can_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--data_root", "x", "--random_flip", "quickstart", "--help"]) == 0
    assert "See it work" in capsys.readouterr().out
    with pytest.raises(UserError, match="'quickstart' and 'scratch' were given: name one preset"):
        run(["train", "--seed", "1", "quickstart", "scratch"])


def test_an_empty_world_size_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0


def test_version_matches_the_package_metadata(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tinyvae {version('tinyvae')}\n"


def test_a_warning_is_one_plain_sentence(tmp_path: Path) -> None:
    save_file(dict(TAEHV("taehv", width=0.125).state_dict()), tmp_path / "untold.safetensors")
    done = tinyvae("info", "untold.safetensors", folder=tmp_path)
    (line,) = done.stderr.splitlines()  # no line of our source
    assert done.returncode == 0 and line.startswith("tinyvae: warning: untold.safetensors could be taehv, taecvx")
    assert "--variant" in line


def test_a_run_of_one_process_starts_without_heavy_packages() -> None:
    """Before its first step a run needs torch, and no package that takes long to import or asks nvidia-smi. tinyvae
    alone loads even less: the half second that it allows itself beyond torch is kept by what is *not* imported."""
    code = """if True:
        import sys, tinyvae
        tinyvae.TAEHV, tinyvae.load_model
        print(*sys.modules)
        from tinyvae.config import TrainConfig
        from tinyvae.training.start import start_engine
        engine = start_engine(TrainConfig())
        assert (engine.rank, engine.world_size, engine.is_main, engine.many) == (0, 1, True, False)
        print(*sys.modules)
    """
    launched = {name for name in os.environ if name in LAUNCH_VARIABLES or name.startswith("ACCELERATE_")}
    alone = {name: value for name, value in os.environ.items() if name not in launched}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=alone)
    alone_loads, run_loads = (set(line.split()) for line in done.stdout.splitlines())
    heavy = {"accelerate", "diffusers", "transformers", "torchmetrics", "tensorboard", "deepspeed", "matplotlib"}
    heavy |= {"torch._dynamo", "torch._inductor", "onnx", "huggingface_hub", "ray", "fsspec", "scipy"}
    heavy |= {"wandb", "mlflow"}
    assert not heavy & (run_loads | {name.split(".")[0] for name in run_loads})
    assert not {"av", "PIL"} & {name.split(".")[0] for name in alone_loads}

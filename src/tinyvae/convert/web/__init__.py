"""A folder with a page that runs the model in the browser: graphs, page, and onnxruntime-web, with no network needed.

The page is three files beside this one: ``index.html`` with ``style.css``, ``page.js`` (what the user sees) and
``worker.js`` (the streams). onnxruntime-web comes from its npm package. npm fetches it once; a copy stays in the cache
folder, and each file is compared with the sha256 that is written here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvae.cache_folder import user_cache
from tinyvae.errors import UserError
from tinyvae.files import atomic_write, sha256_of, writing_to

if TYPE_CHECKING:
    from tinyvae.models.taehv import TAEHV

PAGE_FILES = ("index.html", "style.css", "page.js", "worker.js")
PACKAGE = "onnxruntime-web@1.30.0"
RUNTIME_FILES = {
    "ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
"""File of the package's ``dist`` folder -> its sha256."""
NPM_TIMEOUT_S = 300


def find_runtime() -> Path:
    """The folder with onnxruntime-web's files: ``onnxruntime-web-VERSION`` in the user's cache. npm fetches
    them where they are not there yet."""
    folder = user_cache() / PACKAGE.replace("@", "-")
    if not all(_is_right(folder / name) for name in RUNTIME_FILES):
        fetch_runtime(folder)
    return folder


def fetch_runtime(folder: Path) -> None:
    """Fetch the npm package and keep the two files that the page needs."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(
            f"--to web needs npm once, to fetch {PACKAGE} (it is then kept in {folder}), and npm is not installed; "
            "install it (it comes with Node.js), or use --to onnx."
        )
    with tempfile.TemporaryDirectory() as name:
        command = [npm, "pack", PACKAGE, "--silent"]
        try:
            done = subprocess.run(command, cwd=name, capture_output=True, text=True, timeout=NPM_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"npm did not fetch {PACKAGE} in {NPM_TIMEOUT_S} s; check the network.") from None
        packed = list(Path(name).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
            raise UserError(f"npm could not fetch {PACKAGE} ({last[0]}); check the network and npm's settings.")
        with tarfile.open(packed[0]) as package:
            package.extractall(name, filter="data")
        fetched = [Path(name) / "package" / "dist" / file for file in RUNTIME_FILES]
        for file in fetched:
            if not _is_right(file):
                raise UserError(
                    f"{file.name} of {PACKAGE} is not the file that was expected (sha256); nothing was kept."
                )
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for file in fetched:
                with atomic_write(folder / file.name) as stream:
                    stream.write(file.read_bytes())


def _is_right(file: Path) -> bool:
    return file.is_file() and sha256_of(file) == RUNTIME_FILES[file.name]


def page_files() -> list[str]:
    """The names of the files that `write_page` writes, relative to its folder."""
    return [*(f"ort/{name}" for name in RUNTIME_FILES), *PAGE_FILES, "model.json"]


def write_page(folder: Path, runtime: Path, model: TAEHV, graph_facts: Mapping[str, Any]) -> None:
    """Write page, runtime and ``model.json`` into a folder that holds the graphs.

    ``runtime``: the folder of `find_runtime`. ``graph_facts``: the dtype, and for each side what `describe_stream`
    says; the browser cannot read a graph's metadata.
    """
    (folder / "ort").mkdir()
    for name in RUNTIME_FILES:
        shutil.copyfile(runtime / name, folder / "ort" / name)
    assets = resources.files(__name__)
    for name in PAGE_FILES:
        (folder / name).write_bytes((assets / name).read_bytes())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = {**graph_facts, "teacher": model.spec.teacher, "parameters": parameters}
    (folder / "model.json").write_text(json.dumps(facts, indent=1) + "\n")

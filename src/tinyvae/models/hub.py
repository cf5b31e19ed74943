"""Models of the Hugging Face hub: ``owner/name``, or ``owner/name:file`` where a repository holds several.

A file is downloaded once and then read from huggingface_hub's cache. Where the hub cannot be reached, or with
``HF_HUB_OFFLINE=1``, what was downloaded before is used.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from tinyvae.errors import MissingFileError, UserError, first_line, require_package
from tinyvae.files import FULL_DISK_ERRORS
from tinyvae.terminal import count_of

HUB_NAME = re.compile(
    r"(?P<repo>(?![^:]*(?:--|\.\.))[A-Za-z0-9][\w.-]*\b/\b[\w.-]{1,96}\b(?<!\.git))(?::(?P<file>.+))?",
    re.ASCII,
)
"""``owner/name`` as the hub allows it: no -- or .., no - or . at an end, no .git; ``:file`` behind it."""
FORMATS = (".safetensors", ".pth")
FIRST_CHOICES = [f"{stem}{suffix}" for stem in ("model", "best_model/model", "final_model") for suffix in FORMATS]
"""Of a repository as of a run's folder."""
TIMEOUT_S = 10
SHOWN_FILES = 8
DISK_FAULTS = (*FULL_DISK_ERRORS, errno.EACCES, errno.EPERM, errno.EROFS)  # failures of a network have none of these
LOGIN = "log in with `hf auth login` or set HF_TOKEN"


def names_repository(text: str) -> bool:
    """Whether a text is ``owner/name``, as the hub allows it."""
    match = HUB_NAME.fullmatch(text)
    return match is not None and match["file"] is None


def names_hub_model(path: str) -> bool:
    """Whether a path that does not exist here can be a name of the hub: not a file's, and its first part no folder."""
    match = HUB_NAME.fullmatch(path)
    if match is None or (match["file"] is None and PurePosixPath(path).suffix in FORMATS):
        return False
    return not Path(path.split("/")[0]).exists()


def fetch_weights(path: str) -> Path:
    """The weights file of ``owner/name`` or ``owner/name:file``, in the cache; a `UserError` says why there is none.

    Example: ``fetch_weights("owner/name:taew2_1.safetensors")``.
    """
    match = HUB_NAME.fullmatch(path)
    assert match is not None, path
    repo, wanted = match["repo"], match["file"]
    hub = load_hub("a model from the hub")
    if hub.constants.HF_HUB_OFFLINE:
        return _cached(hub, repo, wanted, why="HF_HUB_OFFLINE is set")
    api = hub.HfApi()
    try:
        # One short question first: a download would try for a minute where there is no network.
        published = [item.rfilename for item in api.model_info(repo, timeout=TIMEOUT_S).siblings or ()]
        file = choose_file(repo, published, wanted)
        config = str(PurePosixPath(file).with_name("config.json"))  # what the weights are, if they do not say it
        if config in published:
            api.hf_hub_download(repo, config)
        return Path(api.hf_hub_download(repo, file))
    except UserError:
        raise  # also an OSError, where a file is missing
    except hub_failures() as failure:
        if answered(failure):
            refuse(repo, failure)
        if getattr(failure, "errno", None) in DISK_FAULTS:
            text = f"{repo} of the hub cannot be saved on this machine ({first_line(failure)})"
            raise UserError(f"{text}; make room, or name another folder with HF_HOME.") from None
        return _cached(hub, repo, wanted, why=f"the hub cannot be reached ({first_line(failure)})")


def choose_file(repo: str, published: Sequence[str], wanted: str | None) -> str:
    """The weights file that a name means among those of a repository."""
    weights = [name for name in published if PurePosixPath(name).suffix in FORMATS]
    if wanted is not None:
        if wanted not in published:
            raise MissingFileError(f"{repo} on the hub has no file {wanted}; it has {list_weights(weights)}.")
        return wanted
    likely = [name for name in FIRST_CHOICES if name in weights]
    if not likely and len(weights) != 1:
        advice = f"name one, as in {repo}:{weights[0]}" if weights else "name another repository"
        raise UserError(f"{repo} on the hub has {list_weights(weights)}; {advice}.")
    return (likely or weights)[0]


def list_weights(names: Sequence[str]) -> str:
    """``2 weight files (a.pth, b.pth)``, for a message."""
    if not names:
        return "no weight file"
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    return f"{count_of(len(names), 'weight file')} ({', '.join(names[:SHOWN_FILES])}{more})"


def _cached(hub: Any, repo: str, wanted: str | None, *, why: str) -> Path:
    """The file as it was downloaded before."""
    there: list[str] = []
    try:
        folder = Path(hub.snapshot_download(repo, local_files_only=True))
        there = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    except FileNotFoundError:  # nothing of this repository was
        pass
    is_there = wanted in there if wanted else any(PurePosixPath(name).suffix in FORMATS for name in there)
    if not is_there:
        what = repo if wanted is None else f"{wanted} of {repo}"
        raise MissingFileError(f"{why}, and {what} was not downloaded before; load it once where there is a network.")
    return folder / choose_file(repo, there, wanted)


# what goes wrong


def load_hub(needed_for: str) -> Any:
    hub = require_package("huggingface_hub", extra="hub", needed_for=needed_for)
    importlib.import_module("huggingface_hub.constants")  # which the package itself does not load
    return hub


def hub_failures() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises where the hub refuses or cannot be reached: OSError, or its HTTP client's errors."""
    clients = [client for client in ("httpx", "httpx2") if importlib.util.find_spec(client) is not None]
    return (OSError, *(importlib.import_module(client).HTTPError for client in clients))


def answered(failure: Exception) -> bool:
    """Whether the hub gave an answer; otherwise it was not reached."""
    return getattr(getattr(failure, "response", None), "status_code", None) is not None


def refuse(repo: str, failure: Exception) -> NoReturn:
    """Raise the error for an answer of the hub that is a refusal."""
    status = failure.response.status_code  # type: ignore[attr-defined]
    if status in (401, 404):
        raise MissingFileError(
            f"there is no model {repo} on the hub that you may see; check the name, or {LOGIN} if it is private."
        ) from None
    if status == 403:
        text = f"the hub refuses {repo} with your token ({first_line(failure)}); ask for access on its page, or {LOGIN}"
        raise UserError(f"{text} with another one.") from None
    raise UserError(f"the hub answers with an error for {repo} ({first_line(failure)}); try again later.") from None

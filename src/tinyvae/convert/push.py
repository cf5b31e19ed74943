"""A model in a repository of the Hugging Face hub: weights, card, settings and report, in one commit."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tinyvae.errors import UserError, first_line
from tinyvae.models.hub import LOGIN, TIMEOUT_S, answered, hub_failures, load_hub, names_repository
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import find_weights, load_model, read_weights, save_model
from tinyvae.terminal import count_of

CARD, REPORT, SETTINGS = "model_card.md", "report.html", "config.json"
PLAIN_CARD = """---
library_name: tinyvae
tags: [video, autoencoder, taehv]
---

# {name}

A tiny video autoencoder of the TAEHV family: {spec.name}, which stands in for the VAE of {spec.teacher}.

- latents: {spec.latent_channels} channels, one for {spec.time_factor} frames of \
{spec.space_factor}x{spec.space_factor} pixels; width factor {spec.width:g}
- {spec.latent_space} space, {spec.activation}

## Use

```python
from tinyvae import load_model
model = load_model("{repo}")
latents = model.encode_video(frames_NTCHW)  # frames in [0, 1]
frames = model.decode_video(latents)
```
"""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What was pushed: the page of the repository, and the names of the files."""

    address: str
    files: tuple[str, ...]

    @property
    def message(self) -> str:
        return f"pushed {count_of(len(self.files), 'file')} ({', '.join(self.files)}) to {self.address}"


def push(run: str | Path, repo: str, *, variant: str | None = None, private: bool = False) -> Pushed:
    """Push a run's best model (or any model that `load_model` reads) to a repository, which is made if need be.

    ``repo``: ``owner/name``. Afterwards ``load_model(repo)`` reads it. ``private``: a new repository is made private,
    and a public one is refused. A `UserError` says what is missing: a token, the network, the right to write.

    Example: ``push("output/my_run", "me/my-vae").address``.
    """
    if not names_repository(repo):
        raise UserError(f"{repo!r} is no name of a repository; write owner/name, as in me/my-vae.")
    weights = find_weights(Path(run))
    model = load_model(weights, variant=variant)
    hub = load_hub("a push to the hub")
    if hub.constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set, and a push needs the hub; unset it.")
    if hub.get_token() is None:
        raise UserError(f"a push needs a token of the hub with the right to write; {LOGIN}.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = collect(folder, Path(run), weights, model, repo)
        try:
            api = hub.HfApi()
            api.create_repo(repo, private=private, exist_ok=True)
            if private and not api.model_info(repo, timeout=TIMEOUT_S).private:
                what = f"{repo} exists on the hub and is public, and --private is for a new repository"
                raise UserError(f"{what}; make it private in its settings, or name another one.")
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"tinyvae push {model.spec.name}")
        except hub_failures() as failure:
            raise UserError(_why_not_pushed(repo, failure)) from None
    return Pushed(address=f"{hub.constants.ENDPOINT}/{repo}", files=tuple(files))


def collect(folder: Path, run: Path, weights: Path, model: TAEHV, repo: str) -> list[str]:
    """Write what is pushed into a folder; returns the names: weights, README.md (the card), settings and report."""
    step = read_weights(weights)[1].get("training_step")
    save_model(model, folder, formats=(".safetensors",), training_step=step)
    card = run / CARD
    if card.is_file():
        # The example of a run's card loads the run's folder.
        text = re.sub(r'load_model\("[^"]*"\)', f'load_model("{repo}")', card.read_text(encoding="utf-8"))
        if (run / SETTINGS).is_file():  # the run's own; config.json describes the network
            shutil.copyfile(run / SETTINGS, folder / "training_config.json")
    else:
        text = PLAIN_CARD.format(name=repo.split("/")[1], repo=repo, spec=model.spec)
    (folder / "README.md").write_text(text, encoding="utf-8")
    if (run / REPORT).is_file():
        shutil.copyfile(run / REPORT, folder / REPORT)
    return sorted(file.name for file in folder.iterdir())


def _why_not_pushed(repo: str, failure: Exception) -> str:
    if not answered(failure):
        return f"the hub cannot be reached ({first_line(failure)}); check the network and push again."
    if failure.response.status_code in (401, 403):  # type: ignore[attr-defined]
        return f"the hub refuses your token for {repo} ({first_line(failure)}); {LOGIN} with one that may write there."
    return f"the hub did not take the push to {repo} ({first_line(failure)}); try again later."

"""A push to a small hub on this machine, and what stops one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.models.hub_server import TOKEN, Hub
from tests.models.test_hub import hub, use_endpoint  # noqa: F401 (a fixture)
from tinyvae import TAEHV, load_model, save_model
from tinyvae.cli.main import main
from tinyvae.convert.push import push
from tinyvae.errors import UserError

constants = pytest.importorskip("huggingface_hub.constants")


def write_run(folder: Path) -> TAEHV:
    """A run's folder as training leaves it."""
    model = TAEHV("taew2_1", width=0.125, latent_space="vae")
    save_model(model, folder / "best_model", training_step=7)
    save_model(TAEHV("taew2_1", width=0.125), folder / "final_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"format": "tinyvae-run", "variant": "taew2_1", "seed": 3}))
    (folder / "model_card.md").write_text('# a card\nmodel = load_model("final_model.safetensors")\n')
    (folder / "report.html").write_text("<p>a report</p>")
    return model


def test_a_run_and_back(
    hub: Hub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = write_run(tmp_path / "run")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(SystemExit) as ended:
        main(["push", str(tmp_path / "run"), "me/vae"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == (
        "pushed 5 files (README.md, config.json, model.safetensors, report.html, training_config.json) to "
        f"{hub.address}/me/vae\n"
    )
    files = hub.repos["me/vae"]
    assert files["README.md"].decode() == '# a card\nmodel = load_model("me/vae")\n'
    assert json.loads(files["training_config.json"])["seed"] == 3
    described = json.loads(files["config.json"])
    assert (described["variant"], described["latent_space"], described["training_step"]) == ("taew2_1", "vae", 7)
    loaded = load_model("me/vae")
    assert loaded.spec == model.spec
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_nothing_private_goes_to_a_public_repository(
    hub: Hub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    file = save_model(TAEHV("taecvx", width=0.125), tmp_path / "a.safetensors")[0]
    for _ in range(2):  # a second push goes to the repository of the first
        push(file, "me/hidden", private=True)
    assert hub.private == {"me/hidden"} and "model.safetensors" in hub.repos["me/hidden"]
    hub.repos["me/shown"] = {}
    with pytest.raises(UserError, match="me/shown exists on the hub and is public"):
        push(file, "me/shown", private=True)
    assert hub.repos["me/shown"] == {}


@pytest.mark.slow
def test_weights_without_a_run_get_a_card(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    save_model(TAEHV("taecvx", width=0.125), tmp_path / "a.safetensors")
    assert push(tmp_path / "a.safetensors", "me/plain").files == ("README.md", "config.json", "model.safetensors")
    card = hub.repos["me/plain"]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: tinyvae") and 'load_model("me/plain")' in card and "CogVideoX" in card


@pytest.mark.slow
def test_what_stops_a_push(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    write_run(tmp_path / "run")
    with pytest.raises(
        UserError, match=r"a push needs a token of the hub .*; log in with `hf auth login` or set HF_TOKEN"
    ):
        push(tmp_path / "run", "me/vae")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match=r"the hub refuses your token for me/vae .* with one that may write there"):
        push(tmp_path / "run", "me/vae")
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the hub cannot be reached \(.*\); check the network"):
        push(tmp_path / "run", "me/vae")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and a push needs the hub; unset it"):
        push(tmp_path / "run", "me/vae")
    assert not hub.repos


@pytest.mark.parametrize("name", ["vae", "me/vae:a.pth", "a/b/c", "me/a--b", "me/-a", "me/vae.", "me/vae.git"])
def test_what_is_no_name_of_a_repository(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is no name of a repository; write owner/name"):
        push(tmp_path / "run", name)

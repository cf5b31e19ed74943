"""Models of the hub, against a small hub on this machine; every way to fail is one sentence."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.models.hub_server import TOKEN, Hub, running_hub
from tinyvae import TAEHV, load_model, save_model
from tinyvae.errors import MissingFileError, UserError
from tinyvae.models.hub import choose_file, names_hub_model, names_repository

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
file_download = pytest.importorskip("huggingface_hub.file_download")
TEMPLATE = "HUGGINGFACE_CO_URL_TEMPLATE"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as running:
        use_endpoint(monkeypatch, running.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield running


def use_endpoint(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """What HF_ENDPOINT does for a new process."""
    for module in (constants, file_download):  # older versions copy the name
        monkeypatch.setattr(module, TEMPLATE, f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", address)


def publish(hub: Hub, name: str, folder: Path, **options: object) -> TAEHV:
    model = TAEHV("taecvx", width=0.125, **options)  # type: ignore[arg-type]
    files = save_model(model, folder)
    hub.repos[name] = {file.name: file.read_bytes() for file in files}
    return model


def test_a_repository_and_a_file_of_it(hub: Hub, tmp_path: Path) -> None:
    model = publish(hub, "me/vae", tmp_path / "made")
    hub.repos["me/vae"]["old/wan.safetensors"] = save(TAEHV("taew2_1", width=0.125).state_dict())
    loaded = load_model("me/vae")
    assert loaded.spec == model.spec
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert load_model("me/vae:old/wan.safetensors", "taew2_1").spec.name == "taew2_1"
    downloads = [line for line in hub.requests if line.startswith("GET") and "resolve" in line]
    with pytest.raises(MissingFileError, match=r"me/vae on the hub has no file x\.pth; it has 3 weight files"):
        load_model("me/vae:x.pth")
    load_model("me/vae")
    assert [line for line in hub.requests if line.startswith("GET") and "resolve" in line] == downloads, (
        "once is enough"
    )


def test_offline_and_without_a_network_the_cache_serves(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, "me/vae", tmp_path / "made")
    load_model("me/vae")
    use_endpoint(monkeypatch, "http://127.0.0.1:9")  # nobody listens there
    assert load_model("me/vae").spec.name == "taecvx"
    with pytest.raises(
        MissingFileError, match=r"the hub cannot be reached \(.*\), and me/other was not downloaded before"
    ):
        load_model("me/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_model("me/vae").spec.name == "taecvx"
    with pytest.raises(
        MissingFileError, match=r"HF_HUB_OFFLINE is set, and b\.pth of me/vae was not downloaded before"
    ):
        load_model("me/vae:b.pth")


def test_a_download_that_was_cut_short_is_not_taken_for_an_empty_repository(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json comes first: without a network its repository has weights, and they are not here."""
    publish(hub, "me/vae", tmp_path / "made")
    huggingface_hub.HfApi().hf_hub_download("me/vae", "config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingFileError, match="HF_HUB_OFFLINE is set, and me/vae was not downloaded before; load it"):
        load_model("me/vae")


def test_the_description_beside_the_weights_comes_along(hub: Hub, tmp_path: Path) -> None:
    """As in a run's folder: best_model holds its own config.json, and these weights state nothing themselves."""
    publish(hub, "me/run", tmp_path / "made")
    files = hub.repos["me/run"]
    weights = save(TAEHV("taew2_1", width=0.125).state_dict())
    config = files["config.json"].replace(b"taecvx", b"taew2_1")
    hub.repos["me/run"] = {"best_model/model.safetensors": weights, "best_model/config.json": config}
    assert load_model("me/run").spec.name == "taew2_1"


def test_a_full_disk_is_no_missing_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, "me/vae", tmp_path / "made")

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", fail)
    with pytest.raises(UserError, match=r"me/vae of the hub cannot be saved .*No space left.*; make room, or name"):
        load_model("me/vae")


def test_what_may_not_be_seen(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, "me/secret", tmp_path / "made")
    hub.private.add("me/secret")
    for name in ("me/secret", "me/nothing"):
        with pytest.raises(
            MissingFileError, match=f"no model {name} on the hub that you may see; check .*hf auth login"
        ):
            load_model(name)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert load_model("me/secret").spec.name == "taecvx"


def test_which_file_of_several() -> None:
    assert choose_file("a/b", ["README.md", "final_model.pth", "best_model/model.safetensors"], None).startswith("best")
    assert choose_file("a/b", ["only.pth", "x.json"], None) == "only.pth"
    with pytest.raises(
        UserError, match=r"a/b on the hub has 2 weight files \(x\.pth, y\.pth\); name one, as in a/b:x\.pth"
    ):
        choose_file("a/b", ["x.pth", "y.pth"], None)
    with pytest.raises(UserError, match="a/b on the hub has no weight file; name another repository"):
        choose_file("a/b", ["README.md"], None)
    with pytest.raises(MissingFileError, match=r"a/b on the hub has no file z\.pth; it has 1 weight file \(x\.pth\)"):
        choose_file("a/b", ["x.pth"], "z.pth")


def test_paths_of_this_machine_are_no_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").mkdir()
    assert names_hub_model("me/vae") and names_hub_model("me/vae:a.pth")
    for path in (
        "output/run",
        "weights/a.safetensors",
        "taehv",
        "/tmp/run",
        "./a",
        "../a/b",
        "a/b/c",
        "me/a--b",
        "me/größe",
        "最佳/vae",
    ):
        assert not names_hub_model(path), path
    assert names_repository("me/vae") and not names_repository("me/vae:a.pth") and not names_repository("./vae")
    with pytest.raises(MissingFileError, match="there is no model at output/run"):
        load_model("output/run")

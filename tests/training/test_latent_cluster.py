"""A latent store made on a real Ray cluster is the store of one process; killed workers cost nothing but time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.data.ray_workers import GivesKilled, KilledOnce
from tests.training.test_golden_losses import write_teacher
from tests.training.test_latents import live
from tinyvae.cli.main import run
from tinyvae.data import latent_store
from tinyvae.training import latent_cluster

pytestmark = pytest.mark.slow


def contents(folder: Path) -> dict[str, Any]:
    """The manifest, and what each shard says and holds; the bytes of its tensors."""
    found: dict[str, Any] = {"manifest": (folder / "store.json").read_text()}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as shard:
            tensors = {name: shard.get_tensor(name).tobytes() for name in shard.keys()}  # noqa: SIM118 - no dictionary
            found[file.name] = (dict(shard.metadata()), tensors)
    return found


def test_the_store_is_that_of_one_process(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips have two sizes. One process that reads and one that encodes are killed with SIGKILL in the middle."""
    pytest.importorskip("ray")
    monkeypatch.setattr(latent_store, "CLIPS_PER_SHARD", 4)
    teacher = write_teacher(tmp_path / "teacher")
    words = live(clips, tmp_path / "run", teacher, resolutions="8x32x32,8x16x24")
    options = ["--clips", "18", "--dtype", "float32", "--output"]
    assert run(["latents", *words, *options, str(tmp_path / "alone")]) == 0
    reading = KilledOnce(latent_cluster.read_part, tmp_path / "reading", call=2)
    encoding = GivesKilled(latent_cluster.open_encoder, tmp_path / "encoding", call=2)
    monkeypatch.setattr(latent_cluster, "read_part", reading)
    monkeypatch.setattr(latent_cluster, "open_encoder", encoding)
    assert run(["latents", *words, *options, str(tmp_path / "cluster"), "--ray", "local"]) == 0
    assert reading.num_calls > 9 and encoding.killed.num_calls > 5, "the killed ones came again"
    alone, cluster = contents(tmp_path / "alone"), contents(tmp_path / "cluster")
    assert len(alone) == 6 and cluster == alone

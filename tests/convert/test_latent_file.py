"""Latents on disk: what is written in pieces is what safetensors reads as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinyvae.convert.latent_file import LatentFacts, LatentReader, write_latents
from tinyvae.errors import FileExistsAlreadyError, MissingFileError, UserError
from tinyvae.video.write import VideoWriter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pieces_make_one_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    latents = torch.randn(1, 7, 16, 3, 4).to(dtype)
    facts = LatentFacts(variant="taehv", num_frames=25, fps=23.976, height=24, width=30, source="ä film.mp4")
    with write_latents(tmp_path / "x.safetensors", facts) as writer:
        for piece in latents.split((1, 4, 2), dim=1):
            writer.write(piece)
    assert torch.equal(load_file(tmp_path / "x.safetensors")["latents"], latents)
    reader = LatentReader(tmp_path / "x.safetensors")
    assert reader.facts == facts and reader.num_latents == 7 and reader.frame_shape == (16, 3, 4)
    assert torch.equal(torch.cat(list(reader.chunks(3)), dim=1), latents)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), write_latents(tmp_path / "x.safetensors", LatentFacts()) as writer:
        writer.write(torch.zeros(1, 1, 16, 2, 2))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("mine")
    with pytest.raises(FileExistsAlreadyError), write_latents(path, LatentFacts()):
        pass
    with write_latents(path, LatentFacts(), overwrite=True) as writer:
        writer.write(torch.zeros(1, 1, 16, 2, 2))
    assert LatentReader(path).num_latents == 1


def test_files_of_other_programs(tmp_path: Path) -> None:
    save_file({"samples": torch.ones(5, 16, 2, 2)}, tmp_path / "a.safetensors")
    reader = LatentReader(tmp_path / "a.safetensors")
    assert reader.num_latents == 5 and next(reader.chunks(2)).shape == (1, 2, 16, 2, 2)
    assert reader.facts == LatentFacts()
    save_file({"weight": torch.ones(5)}, tmp_path / "b.safetensors")
    with pytest.raises(UserError, match="holds no tensor named 'latents'"):
        LatentReader(tmp_path / "b.safetensors")
    save_file({"latents": torch.ones(2, 5, 16, 2, 2)}, tmp_path / "c.safetensors")
    with pytest.raises(UserError, match="holds 2 videos"):
        LatentReader(tmp_path / "c.safetensors")
    for content in (b"no safetensors file", b"\x00" * 5):
        (tmp_path / "d.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=r"not a whole safetensors file .*make one with: tinyvae encode"):
            LatentReader(tmp_path / "d.safetensors")
    with pytest.raises(MissingFileError, match="no latents file"):
        LatentReader(tmp_path / "e.safetensors")


def test_long_names_in_any_script_fit(tmp_path: Path) -> None:
    for name in ("🎬" * 600, "影片" * 600, "bad \udcff byte"):
        with write_latents(tmp_path / "x.safetensors", LatentFacts(source=name), overwrite=True) as writer:
            writer.write(torch.zeros(1, 1, 16, 2, 2))
        source = LatentReader(tmp_path / "x.safetensors").facts.source
        assert source is not None and source == name[-500:].replace("\udcff", "?")


def test_a_video_is_not_latents(tmp_path: Path) -> None:
    with VideoWriter(tmp_path / "film.mp4", fps=24, width=32, height=32) as writer:
        writer.write(torch.zeros(3, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"film\.mp4 is a video, and decode takes latents.*tinyvae encode.*reconstruct"):
        LatentReader(tmp_path / "film.mp4")


def test_nothing_to_decode_is_said(tmp_path: Path) -> None:
    save_file({"latents": torch.zeros(1, 0, 16, 2, 2)}, tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="holds no latent"):
        LatentReader(tmp_path / "none.safetensors")
    save_file({"latents": torch.zeros(5, 16)}, tmp_path / "flat.safetensors")
    with pytest.raises(UserError, match=r"no tensor named 'latents' with 4 or 5 dimensions \(it has latents\)"):
        LatentReader(tmp_path / "flat.safetensors")


@pytest.mark.parametrize("stated", ["{", "[1]", '{"height": "tall"}', '{"num_frames": -3}', '{"latent_space": "x"}'])
def test_damaged_metadata_is_said(tmp_path: Path, stated: str) -> None:
    save_file({"latents": torch.zeros(1, 1, 16, 2, 2)}, tmp_path / "bad.safetensors", {"tinyvae_latents": stated})
    with pytest.raises(UserError, match=r"metadata of .* is damaged"):
        LatentReader(tmp_path / "bad.safetensors")

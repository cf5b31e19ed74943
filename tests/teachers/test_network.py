"""A network of ours as a teacher: its own latents, only for students of the same latents, and in a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.training.tiny_runs import arguments_for, train_here, write_clips
from tinyvae import TAEHV, save_model
from tinyvae.errors import UserError
from tinyvae.evaluation.cost import StageTimes
from tinyvae.evaluation.round_trip import TeacherRoundTrip
from tinyvae.models.variants import get_spec
from tinyvae.teachers import check_teacher, find_teacher, identify_teacher, load_teacher


def saved(path: Path, variant: str = "taew2_2", **options: object) -> TAEHV:
    torch.manual_seed(0)
    model = TAEHV(variant, width=0.125, **options).eval()  # type: ignore[arg-type]
    save_model(model, path)
    return model


@pytest.mark.parametrize("num_frames", [8, 9])
def test_latents_are_those_of_the_network(tmp_path: Path, num_frames: int) -> None:
    """Of all frames, also where fewer come back: teacher and student see the same."""
    model = saved(tmp_path / "whole.safetensors")
    spec = get_spec("taew2_2_super", width=0.25)  # another decoder and width, the same latents
    teacher = load_teacher(None, tmp_path / "whole.safetensors", dtype=torch.float32, device="cpu", spec=spec)
    frames = torch.rand(2, num_frames, 3, 32, 48)
    assert teacher.clip_of(frames).shape == frames.shape
    mean, std = teacher.distribution(frames, with_std=True)
    torch.testing.assert_close(mean, model.encode_video(frames), atol=1e-5, rtol=1e-4)
    assert std is not None and not std.any()
    torch.testing.assert_close(teacher.encode(frames), mean)
    torch.testing.assert_close(teacher.decode(mean), model.decode_video(mean), atol=1e-5, rtol=1e-4)
    assert teacher.class_name == "TAEHV" and teacher.num_parameters == sum(p.numel() for p in model.parameters())


def test_an_evaluation_gives_it_all_frames_too(tmp_path: Path) -> None:
    model = saved(tmp_path / "whole.safetensors")
    trip = TeacherRoundTrip.open(
        tmp_path / "whole.safetensors", device=torch.device("cpu"), dtype=None, spec=get_spec("taew2_2", width=0.25)
    )
    frames = torch.rand(1, 8, 3, 32, 32)
    (latents,) = trip.encode([frames], 8, StageTimes())
    torch.testing.assert_close(latents, model.encode_video(frames), atol=1e-5, rtol=1e-4)


def test_a_name_that_speaks_of_another_variant_is_no_students_teacher(tmp_path: Path) -> None:
    torch.save(saved(tmp_path / "stated.pth", "taew2_1").state_dict(), tmp_path / "taew2_1.pth")
    with pytest.raises(UserError, match="its name speaks of taew2_1; take a teacher for taehv, or rename the file"):
        check_teacher(tmp_path / "taew2_1.pth", None, get_spec("taehv"))


def test_a_teacher_of_other_latents_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "taew2_1", "taew2_1")  # a model folder
    file = tmp_path / "taew2_1"
    check_teacher(file, None, get_spec("taew2_1"))
    check_teacher(file, "taehv", get_spec("taew2_1", width=0.5))
    with pytest.raises(UserError, match=r"another latent space than .*; use variant taew2_1"):
        check_teacher(file, None, get_spec("taehv"))
    with pytest.raises(UserError, match=r"has 16 latent channels.*48 latent channels"):
        check_teacher(file, None, get_spec("taew2_2"))
    with pytest.raises(UserError, match="of kind taehv, not wan"):
        check_teacher(file, "wan", get_spec("taew2_1"))
    with pytest.raises(UserError, match="latents of diffusion space; set latent_space to diffusion"):
        check_teacher(file, None, get_spec("taew2_1", latent_space="vae"))
    with pytest.raises(UserError, match=r"no model at .*nothing\.pth"):
        check_teacher(tmp_path / "nothing.pth", "taehv", get_spec("taew2_1"))


@pytest.mark.parametrize("name", ["Wan2.1_VAE.pth", "wan_2.1_vae.safetensors"])
def test_a_vae_as_its_authors_publish_it_is_told_where_diffusers_has_it(tmp_path: Path, name: str) -> None:
    write = save_file if name.endswith(".safetensors") else torch.save
    write({"encoder.conv1.weight": torch.zeros(4, 3, 3, 3, 3)}, tmp_path / name)
    with pytest.raises(UserError, match=f"{name} is neither .*; name the folder of a VAE that diffusers can load"):
        check_teacher(tmp_path / name, None, get_spec("taew2_1"))


def test_weights_that_state_nothing_are_the_students(tmp_path: Path) -> None:
    """Upstream's files state no variant, and four variants share one network."""
    model = saved(tmp_path / "stated.pth", "taecvx")
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    check_teacher(tmp_path / "plain.pth", None, get_spec("taecvx", width=0.125))
    assert find_teacher(tmp_path / "plain.pth", None, presumed="taecvx").config["variant"] == "taecvx"


def test_identity_follows_the_weights(tmp_path: Path) -> None:
    model = saved(tmp_path / "a.safetensors")
    save_model(model, tmp_path / "b.safetensors")
    known = identify_teacher(tmp_path / "a.safetensors")
    assert known is not None and known["class"] == "TAEHV"
    with torch.no_grad():
        model.encoder[0].weight += 1
    save_model(model, tmp_path / "c.safetensors")
    changed = identify_teacher(tmp_path / "c.safetensors")
    assert changed is not None and changed["weights"] != known["weights"] and changed["config"] == known["config"]


def test_identity_does_not_depend_on_a_files_name(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Upstream's `taecvx.pth` states nothing: as a model it is refused without a variant, as a teacher it is known."""
    model = saved(tmp_path / "stated.pth", "taecvx")
    for name in ("plain.pth", "taecvx.pth"):
        torch.save(model.state_dict(), tmp_path / name)
    known = identify_teacher(tmp_path / "taecvx.pth")
    assert known is not None and known["class"] == "TAEHV" and not recwarn.list
    for name in ("plain.pth", "stated.pth"):
        other = identify_teacher(tmp_path / name)
        assert other is not None and (other["config"] == known["config"]) == (name == "plain.pth")


@pytest.mark.slow
def test_a_run_learns_from_it(tmp_path: Path) -> None:
    """The whole network teaches its narrower form, which starts from weights of its own."""
    saved(tmp_path / "whole.safetensors", "taehv")
    run = tmp_path / "run"
    settings = {
        "use_ref_vae": True,
        "ref_vae_path": str(tmp_path / "whole.safetensors"),
        "ref_vae_dtype": "float32",
        "encoder_loss_weight": 1.0,
        "decoder_loss_weight": 1.0,
    }
    train_here(arguments_for(write_clips(tmp_path / "clips"), run, max_train_steps=2, **settings))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("encoder_loss" in str(line) and "decoder_loss" in str(line) for line in lines)

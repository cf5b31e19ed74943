"""Teachers: tiny random VAEs of every family, saved to disk and loaded by the code that loads the real ones.

Latents must be diffusers' own `encode(...).latent_dist.mode()`, brought to diffusion space by the formula that the
family's own diffusers pipeline uses; each formula is written out here once more, from the pipeline.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyvae.errors import MissingFileError, UserError
from tinyvae.models.variants import get_spec
from tinyvae.teachers import Teacher, TeacherError, check_teacher, identify_teacher, load_teacher
from tinyvae.teachers.families import FAMILIES, geometry_of

diffusers = pytest.importorskip("diffusers")

LTX_BLOCKS = {
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 8, 8, 8),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
}
LTX2_BLOCKS = {
    "block_out_channels": (16, 16, 16, 16),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
}
H3_BLOCKS = {
    "block_out_channels": (8, 8, 8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 16,
    "latents_mean": tuple(0.01 * index for index in range(24)),
    "latents_std": tuple(0.5 + 0.1 * index for index in range(24)),
}
SMALL = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
HUNYUAN_15 = {"block_out_channels": (32, 32, 32, 64, 64), "layers_per_block": 1}
WAN_22 = {
    "z_dim": 48,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "is_residual": True,
    "decoder_base_dim": 8,
    "scale_factor_spatial": 16,
    "latents_mean": [0.02 * index for index in range(48)],
    "latents_std": [1 + 0.1 * index for index in range(48)],
}

# variant -> kind, class, small network, clip length, pixels
TEACHERS: dict[str, tuple[str, str, dict[str, Any], int, int]] = {
    "taecvx": ("cogvideox", "AutoencoderKLCogVideoX", {**SMALL, "scaling_factor": 0.7}, 9, 16),
    "taew2_1": ("wan", "AutoencoderKLWan", {"base_dim": 8, "num_res_blocks": 1}, 9, 16),
    "taew2_2": ("wan", "AutoencoderKLWan", {"base_dim": 8, "num_res_blocks": 1, **WAN_22}, 5, 32),
    "taehv": ("hunyuan", "AutoencoderKLHunyuanVideo", SMALL, 9, 16),
    "taehv1_5": ("hunyuan", "AutoencoderKLHunyuanVideo15", HUNYUAN_15, 5, 32),
    "taeltx_2": ("ltx", "AutoencoderKLLTX2Video", LTX2_BLOCKS, 9, 64),
    "taeltx2_3": ("ltx", "AutoencoderKLLTXVideo", {**LTX_BLOCKS, "scaling_factor": 0.9}, 9, 64),
    "taeh3": ("minimax", "AutoencoderKLMiniMaxH3", H3_BLOCKS, 34, 32),
}


def scaled(z: Tensor, vae: Any) -> Tensor:
    return z * vae.config.scaling_factor


def wan_space(z: Tensor, vae: Any) -> Tensor:
    mean = torch.tensor(vae.config.latents_mean).view(1, vae.config.z_dim, 1, 1, 1)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, vae.config.z_dim, 1, 1, 1)
    return (z - mean) * inverse_std


def ltx_space(z: Tensor, vae: Any) -> Tensor:
    mean, std = (value.view(1, -1, 1, 1, 1) for value in (vae.latents_mean, vae.latents_std))
    return (z - mean) * vae.config.scaling_factor / std


def minimax_space(z: Tensor, vae: Any) -> Tensor:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    return (z - mean) / std


PIPELINE_FORMULA: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "cogvideox": scaled,
    "wan": wan_space,
    "hunyuan": scaled,
    "ltx": ltx_space,
    "minimax": minimax_space,
}


IMAGENET = tuple(torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def pipeline_pixels(video_NTCHW: Tensor, kind: str) -> Tensor:
    """What the pipelines give their VAE, NCTHW."""
    mean, std = IMAGENET if kind == "minimax" else (0.5, 0.5)
    return ((video_NTCHW - mean) / std).transpose(1, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for variant, (_, class_name, options, _, _) in TEACHERS.items():
        if not hasattr(diffusers, class_name):
            continue
        torch.manual_seed(0)
        vae = getattr(diffusers, class_name)(**options)
        if "LTX" in class_name:  # the one family whose latent statistics are among the weights
            vae.latents_mean.copy_(torch.randn(128))
            vae.latents_std.copy_(torch.rand(128) + 0.5)
        made[variant] = tmp_path_factory.mktemp(variant)
        vae.save_pretrained(made[variant])
    return made


def folder_of(folders: dict[str, Path], variant: str) -> Path:
    if variant not in folders:
        pytest.skip(f"diffusers {diffusers.__version__} has no {TEACHERS[variant][1]}")
    return folders[variant]


def load(folders: dict[str, Path], variant: str, **options: Any) -> Teacher:
    settings = {"dtype": torch.float32, "device": "cpu", "spec": get_spec(variant), **options}
    return load_teacher(TEACHERS[variant][0], folder_of(folders, variant), **settings)


def clip(variant: str, batch: int = 2) -> Tensor:
    """The frames a trainer gives: those of the clip that the student decodes."""
    *_, n_frames, pixels = TEACHERS[variant]
    generator = torch.Generator().manual_seed(1)
    frames = torch.rand((batch, n_frames, 3, pixels, pixels), generator=generator)
    return frames[:, : get_spec(variant).aligned_frames(n_frames)]


@pytest.mark.parametrize("variant", TEACHERS)
def test_latents_are_diffusers_own_in_diffusion_space(folders: dict[str, Path], variant: str) -> None:
    kind, class_name, *_, n_frames, _ = TEACHERS[variant]
    teacher = load(folders, variant)
    frames = clip(variant)
    found = teacher.encode(frames)
    assert found.shape[1] == get_spec(variant).latents(n_frames), "the student makes as many of the whole clip"
    vae = getattr(diffusers, class_name).from_pretrained(folders[variant]).eval()
    with torch.no_grad():
        videos = pipeline_pixels(frames, kind).split(1)  # diffusers' Hunyuan 1.5 takes one at a time
        z = torch.cat([vae.encode(video).latent_dist.mode() for video in videos])
    expected = PIPELINE_FORMULA[kind](z, vae).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(found, z.transpose(1, 2), atol=1e-3), "the scaling must show"
    assert not found.requires_grad and found.dtype == torch.float32

    decoded = teacher.decode(found)
    assert decoded.shape == frames.shape
    assert decoded.min() >= 0 and decoded.max() <= 1
    with torch.no_grad():
        own = torch.cat([vae.decode(part).sample for part in z.split(1)]).transpose(1, 2)
    mean, std = IMAGENET if kind == "minimax" else (0.5, 0.5)
    own = own * std + mean
    torch.testing.assert_close(decoded, own.clamp(0, 1), atol=2e-4, rtol=0)


def test_a_student_of_vae_space_gets_the_vaes_own_latents(folders: dict[str, Path]) -> None:
    frames = clip("taew2_1")
    teacher = load(folders, "taew2_1", spec=get_spec("taew2_1", latent_space="vae"))
    vae = diffusers.AutoencoderKLWan.from_pretrained(folders["taew2_1"]).eval()
    with torch.no_grad():
        z = vae.encode(2 * frames.transpose(1, 2) - 1).latent_dist.mode().transpose(1, 2)
    latents = teacher.encode(frames)
    torch.testing.assert_close(latents, z, atol=2e-5, rtol=1e-5)
    plain = load(folders, "taew2_1")
    torch.testing.assert_close(teacher.decode(latents), plain.decode(plain.encode(frames)), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("variant", "n_frames"), [("taecvx", 16), ("taecvx", 17), ("taehv", 17), ("taehv", 20)])
def test_lengths_on_which_student_and_teacher_agree(folders: dict[str, Path], variant: str, n_frames: int) -> None:
    spec = get_spec(variant)
    frames = torch.rand(1, spec.aligned_frames(n_frames), 3, 16, 16)
    assert load(folders, variant).encode(frames).shape[1] == spec.latents(n_frames)


def test_frozen_and_absent_from_whatever_holds_it(folders: dict[str, Path]) -> None:
    class Task(torch.nn.Module):
        def __init__(self, teacher: Teacher) -> None:
            super().__init__()
            self.student = torch.nn.Linear(2, 2)
            self.teacher = teacher

    teacher = load(folders, "taew2_1")
    task = Task(teacher).train()
    assert set(task.state_dict()) == {"student.weight", "student.bias"}
    assert len(list(task.parameters())) == 2 and len(list(task.modules())) == 2
    assert not teacher._vae.training
    assert not any(parameter.requires_grad for parameter in teacher._vae.parameters())


def test_autocast_changes_nothing(folders: dict[str, Path]) -> None:
    teacher, frames = load(folders, "taecvx"), clip("taecvx", batch=3)
    whole = teacher.encode(frames)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(teacher.encode(frames), whole)


def test_fewer_clips_at_once_where_memory_runs_out(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    teacher, frames = load(folders, "taecvx"), clip("taecvx", batch=5)
    alone = teacher.encode(frames)
    monkeypatch.setattr(teacher, "_one_at_a_time", False)  # as on a GPU
    sizes: list[int] = []
    run = teacher._encode_part

    def run_two(part: Tensor) -> Any:
        sizes.append(len(part))
        if len(part) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(part)

    monkeypatch.setattr(teacher, "_encode_part", run_two)
    caplog.set_level("INFO")
    for _ in range(2):
        torch.testing.assert_close(teacher.encode(frames), alone, rtol=1e-4, atol=1e-5)
    assert sizes == [5, 2, 2, 1, 2, 2, 1], "and it stays so"
    assert caplog.text.count("fewer clips at once") == 1


def test_any_autocast_around_any_dtype(folders: dict[str, Path]) -> None:
    """A run in fp16 with a teacher in bf16: torch refuses to join its parts under autocast on a CPU."""
    teacher = load(folders, "taew2_1", dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        mean, std = teacher.distribution(clip("taew2_1"), with_std=True)
        decoded = teacher.decode(teacher.encode(clip("taew2_1")))
    assert mean.dtype == torch.bfloat16 and std is not None and decoded.dtype == torch.float32


def test_bf16_weights_give_fp32_latents(folders: dict[str, Path]) -> None:
    teacher = load(folders, "taew2_1", dtype=torch.bfloat16)
    assert teacher.dtype == torch.bfloat16
    found, exact = teacher.encode(clip("taew2_1")), load(folders, "taew2_1").encode(clip("taew2_1"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, atol=0.1, rtol=0.1)


def test_a_clips_distribution_does_not_depend_on_its_neighbors(folders: dict[str, Path]) -> None:
    teacher, frames = load(folders, "taew2_1"), clip("taew2_1", batch=3)
    mean, std = teacher.distribution(frames, with_std=True)
    assert std is not None and std.shape == mean.shape and (std > 0).all()
    torch.testing.assert_close(teacher.space.normalize(mean), teacher.encode(frames), atol=1e-5, rtol=1e-5)
    alone, no_std = teacher.distribution(frames[1:2])
    assert no_std is None and torch.equal(alone, mean[1:2]), "to the last bit on a CPU"


def test_what_tells_one_teacher_from_another(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "pipeline" / "vae"
    shutil.copytree(folders["taew2_1"], folder)
    known = identify_teacher(folder)
    assert known is not None and known["class"] == "AutoencoderKLWan"
    assert identify_teacher(tmp_path / "pipeline") == known == identify_teacher(folders["taew2_1"])
    edit_config(folder, _diffusers_version="0.1")
    known = identify_teacher(folder)
    edit_config(folder, _diffusers_version="0.2", _name_or_path="elsewhere")
    assert known is not None and identify_teacher(folder) == known
    edit_config(folder, scaling_factor=2.0)
    changed = identify_teacher(folder)
    assert changed is not None and {key for key in known if known[key] != changed[key]} == {"config"}
    weights = folder / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    retrained = identify_teacher(folder)
    assert retrained is not None and retrained["weights"] != known["weights"]
    weights.unlink()
    assert identify_teacher(folder) is None and identify_teacher("nobody/nothing") is None


def test_what_is_not_finite_stops_the_run(folders: dict[str, Path]) -> None:
    teacher = load(folders, "taew2_1")
    frames = clip("taew2_1")
    with pytest.raises(TeacherError, match="frames themselves"):
        teacher.encode(frames * float("nan"))
    with torch.no_grad():
        next(teacher._vae.parameters()).fill_(float("inf"))
    with pytest.raises(TeacherError, match="ref_vae_dtype"):
        teacher.encode(frames)


def test_another_latent_count_stops_the_run(folders: dict[str, Path]) -> None:
    teacher = load(folders, "taew2_1")
    teacher._vae.encode = lambda video, encode=teacher._vae.encode: encode(video[:, :, :5])  # counts otherwise
    with pytest.raises(TeacherError, match="clip length"):
        teacher.encode(clip("taew2_1"))


def test_a_whole_clip_instead_of_its_target_is_our_own_mistake(folders: dict[str, Path]) -> None:
    with pytest.raises(AssertionError, match="give clip_of the 16 frames"):
        load(folders, "taew2_1").encode(torch.rand(1, 16, 3, 16, 16))
    assert load(folders, "taew2_1").clip_of(torch.rand(1, 16, 3, 16, 16)).shape[1] == 13


# the check at start-up


def test_the_right_teacher_passes(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the check must not read weights")

    monkeypatch.setattr(diffusers.ModelMixin, "from_pretrained", refuse)
    for variant, folder in folders.items():
        check_teacher(folder, TEACHERS[variant][0], get_spec(variant))
        check_teacher(str(folder), None, get_spec(variant, width=0.25))


def test_a_pipeline_folder_has_its_vae_inside(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["taecvx"], tmp_path / "vae")
    (tmp_path / "model_index.json").write_text("{}")
    check_teacher(tmp_path, "cogvideox", get_spec("taecvx"))
    assert load_teacher(None, tmp_path, dtype=torch.float32, device="cpu").class_name == "AutoencoderKLCogVideoX"


@pytest.mark.parametrize(
    ("teacher", "variant", "says"),
    [
        ("taew2_1", "taew2_2", "16 latent channels.*48 latent channels.*use variant taew2_1"),
        ("taew2_2", "taew2_1", "use variant taew2_2 or taew2_2_super"),
        ("taehv", "taew2_1", "another latent space.*use variant taehv"),
        ("taew2_1", "taecvx", "use variant taew2_1"),
        ("taecvx", "taeos1_3", "another latent space than Open-Sora"),
    ],
)
def test_a_teacher_of_another_student(folders: dict[str, Path], teacher: str, variant: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_teacher(folders[teacher], None, get_spec(variant))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_mistakes_in_a_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(folders["taew2_1"], folder)
    spec = get_spec("taew2_1")

    def refused(says: str, kind: str | None = None, error: type[UserError] = UserError) -> None:
        with pytest.raises(error, match=says):
            check_teacher(folder, kind, spec)

    refused("'wann'. Did you mean 'wan'", kind="wann")
    refused("of kind wan, not hunyuan", kind="hunyuan")
    edit_config(folder, latents_mean=[0.0] * 4)
    refused("4 latents_mean for 16")
    edit_config(folder, latents_mean=[0.0] * 16, latents_std=[0.0] * 16)
    refused("not above 0")
    edit_config(folder, latents_std=["x"] * 16)
    refused("that is no number")
    edit_config(folder, latents_std=[1.0] * 16, dim_mult=4)
    refused("has a value that no AutoencoderKLWan has")
    edit_config(folder, dim_mult=[1, 2, 4, 4], _class_name=["AutoencoderKLWan"])
    refused("_class_name")
    edit_config(folder, _class_name=None)
    refused("_class_name")
    check_teacher(folder, "wan", spec)
    edit_config(folder, _class_name="AutoencoderKL")
    refused("is a AutoencoderKL; tinyvae learns from")
    (folder / "config.json").write_text("{")
    refused("is no JSON")
    (folder / "config.json").unlink()
    refused("has no config.json", error=MissingFileError)


def test_weights_that_are_missing_broken_or_of_another_shape(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(folders["taew2_1"], folder)
    weights = folder / "diffusion_pytorch_model.safetensors"
    edit_config(folder, base_dim=16)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_teacher(None, folder, dtype=torch.float32, device="cpu")
    edit_config(folder, base_dim=8)
    whole = load_file(weights)
    save_file({name: values for name, values in whole.items() if not name.startswith("decoder.conv_out.")}, weights)
    with pytest.raises(UserError, match=r"cannot be loaded: its weights lack decoder.conv_out.bias and 1 more; take"):
        load_teacher(None, folder, dtype=torch.float32, device="cpu")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="is not a whole file"):
        load_teacher(None, folder, dtype=torch.float32, device="cpu")
    with pytest.raises(UserError, match="is a file"):
        check_teacher(weights, None, get_spec("taew2_1"))
    weights.unlink()
    with pytest.raises(MissingFileError, match="has no weights"):
        check_teacher(folder, None, get_spec("taew2_1"))


def test_only_the_weights_that_are_loaded_count(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, spec = tmp_path / "teacher", get_spec("taew2_1")
    shutil.copytree(folders["taew2_1"], folder)
    weights = folder / "diffusion_pytorch_model.safetensors"
    (folder / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"cut off")
    check_teacher(folder, None, spec)
    shutil.move(weights, folder / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(MissingFileError, match=r"has no weights \(diffusion_pytorch_model.safetensors\)"):
        check_teacher(folder, None, spec)


# the hub


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    monkeypatch.chdir(tmp_path)
    for missing in ("a/b/c", "/no/such/folder", "checkpoints/none", "./none", "../none", "models/my--vae", "me/größe"):
        assert identify_teacher(missing) is None
        with pytest.raises(MissingFileError, match=f"no teacher folder {missing}"):
            check_teacher(missing, "cogvideox", get_spec("taecvx"))


def test_a_hub_name_that_was_downloaded_before(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    revision = "0" * 40
    repository = tmp_path / "models--someone--cogvideox"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    shutil.copytree(folders["taecvx"], repository / "snapshots" / revision / "vae")
    check_teacher("someone/cogvideox", None, get_spec("taecvx"))


def test_every_variant_with_a_teacher_names_it() -> None:
    for family in FAMILIES.values():
        for name in family.variants:
            assert family.variant_candidates(geometry_of(get_spec(name))), name

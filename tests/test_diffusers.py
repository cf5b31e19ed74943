"""`AutoencoderTinyVideo` by itself: numbers, files, switches, offload, and a fused copy that follows the weights."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tinyvae import TAEHV, VARIANTS, FusedTAEHV, get_spec, load_model, save_model
from tinyvae.errors import UserError

diffusers = pytest.importorskip("diffusers")

from tinyvae.diffusers import AutoencoderTinyVideo  # noqa: E402 (needs the package)

pytestmark = pytest.mark.slow
WIDTH = 0.125
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    """As pipelines call a VAE."""
    with torch.no_grad():
        yield


def small_vae(variant: str = "taew2_1", **options: Any) -> AutoencoderTinyVideo:
    vae = AutoencoderTinyVideo(variant, width=WIDTH, **options).eval()
    vae.decoder[-1].bias.fill_(0.5)
    vae.decoder[-1].weight.mul_(8)
    return vae


def plain_network(vae: AutoencoderTinyVideo) -> TAEHV:
    """The same weights in a network that shares nothing with the VAE."""
    model = TAEHV(vae.spec.name, width=vae.spec.width).eval()
    model.load_state_dict(vae.state_dict())
    return model.to(vae.dtype)


def some_latents(vae: AutoencoderTinyVideo, *, videos: int = 1, length: int = 3, size: int = 2) -> Tensor:
    """z of a size that these statistics make likely."""
    mean, std = (getattr(vae, f"latents_{name}").view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    shape = (videos, vae.spec.latent_channels, length, size, size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * std / vae.config.scaling_factor + mean


def some_video(vae: AutoencoderTinyVideo, *, videos: int = 1, length: int = 9, size: int = 2) -> Tensor:
    side = size * vae.spec.space_factor
    return torch.rand((videos, 3, length, side, side), generator=torch.Generator().manual_seed(2)) * 2 - 1


def reference_space(vae: AutoencoderTinyVideo, z_NCTHW: Tensor) -> Tensor:
    """z in diffusion space, NTCHW: the formula of the table in docs/teachers.md."""
    mean, std = (torch.tensor(vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    return ((z_NCTHW - mean) * vae.config.scaling_factor / std).transpose(1, 2)


def reference_frames(vae: AutoencoderTinyVideo, video_NCTHW: Tensor) -> Tensor:
    if vae.spec.name == "taeh3":
        mean, std = (torch.tensor(values).view(1, 3, 1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        return (video_NCTHW * std + mean).transpose(1, 2)
    return ((video_NCTHW + 1) / 2).transpose(1, 2)


# numbers


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_and_encoding_are_the_plain_networks(variant: str) -> None:
    vae = small_vae(variant)
    model = plain_network(vae)
    z = some_latents(vae, length=4)
    video = vae.decode(z).sample
    assert video.shape == (1, 3, vae.spec.frames_from_latents(4), 2 * vae.spec.space_factor, 2 * vae.spec.space_factor)
    assert video.is_contiguous()
    torch.testing.assert_close(
        reference_frames(vae, video), model.decode_video(reference_space(vae, z)), atol=2e-5, rtol=0
    )
    clip = video.clamp(-1, 1) if variant != "taeh3" else video
    found = vae.encode(clip).latent_dist.mode()
    expected = model.encode_video(reference_frames(vae, clip))
    torch.testing.assert_close(reference_space(vae, found), expected, atol=2e-5, rtol=0)


LTX_BLOCKS = {"decoder_layers_per_block": (1, 1, 1, 1), "layers_per_block": (1, 1, 1, 1, 1)}
LTX_BLOCKS |= {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}  # as LTX-2's config.json says
SMALL = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
WAN_22 = {"z_dim": 48, "in_channels": 12, "out_channels": 12, "patch_size": 2, "is_residual": True}
TEACHERS: dict[str, tuple[str, dict[str, Any], list[int], list[int]]] = {
    # variant -> class, small network, clip lengths, latent counts
    "taew2_1": ("AutoencoderKLWan", {"base_dim": 8, "num_res_blocks": 1}, [1, 4, 5, 6, 9], [1, 2, 3]),
    "taew2_2": (
        "AutoencoderKLWan",
        {"base_dim": 8, "num_res_blocks": 1, "decoder_base_dim": 8, "scale_factor_spatial": 16, **WAN_22},
        [1, 5],
        [1, 2, 3],
    ),
    "taehv": ("AutoencoderKLHunyuanVideo", SMALL, [1, 5, 8, 9], [1, 2, 3]),
    "taehv1_5": (
        "AutoencoderKLHunyuanVideo15",
        {"block_out_channels": (32, 32, 32, 64, 64), "layers_per_block": 1},
        [1, 5, 9],
        [1, 2, 3],
    ),
    "taecvx": ("AutoencoderKLCogVideoX", SMALL, [1, 5, 8, 9, 16, 17], [1, 2, 3, 4, 5]),
    "taeltx_2": (
        "AutoencoderKLLTX2Video",
        {"block_out_channels": (16,) * 4, "decoder_block_out_channels": (8, 16, 32), **LTX_BLOCKS},
        [1, 9, 17],
        [1, 2, 3],
    ),
    "taeh3": (
        "AutoencoderKLMiniMaxH3",
        {
            "block_out_channels": (8,) * 6,
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "decoder_num_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 16,
        },
        [1, 17, 22, 34],
        [3, 4, 5, 6, 7, 12],
    ),
}


def small_teacher(variant: str) -> Any:
    class_name, options, *_ = TEACHERS[variant]
    if not hasattr(diffusers, class_name):
        pytest.skip(f"diffusers {diffusers.__version__} has no {class_name}")
    return getattr(diffusers, class_name)(**options).eval()


@pytest.mark.parametrize("variant", TEACHERS)
def test_frames_and_latents_are_as_many_as_the_teachers(variant: str) -> None:
    *_, lengths, counts = TEACHERS[variant]
    teacher, vae = small_teacher(variant), small_vae(variant)
    side = 2 * vae.spec.space_factor
    for length in lengths:
        clip = torch.zeros(1, 3, length, side, side)
        theirs = teacher.encode(clip).latent_dist.mode().shape
        assert vae.encode(clip).latent_dist.mode().shape == theirs, f"{length} frames"
    for count in counts:
        z = torch.zeros(1, vae.spec.latent_channels, count, 2, 2)
        assert vae.decode(z).sample.shape == teacher.decode(z).sample.shape, f"{count} latents"


@pytest.mark.parametrize("variant", TEACHERS)
def test_pipelines_find_what_they_read_from_the_teacher(variant: str) -> None:
    """Every name that a pipeline reads has the teacher's value; from the config or from the VAE itself."""
    teacher, vae = small_teacher(variant), small_vae(variant)
    keys = {"z_dim", "latent_channels", "scale_factor_temporal", "scale_factor_spatial", "timestep_conditioning"}
    keys |= {"spatial_compression_ratio", "clip_length", "token_drop", "temperal_downsample"}
    for key in keys & {key for key, value in teacher.config.items() if value is not None}:
        assert vae.config[key] == teacher.config[key], key
    if variant == "taecvx":
        assert len(vae.config.block_out_channels) == len(teacher.config.block_out_channels)
        assert vae.config.temporal_compression_ratio == teacher.config.temporal_compression_ratio
    names = {"temporal_compression_ratio", "temperal_downsample", "tokens_chunk_size"}
    if not variant.startswith("taew"):  # Wan's pipelines read it from the config
        names.add("spatial_compression_ratio")
    for name in names & vars(teacher).keys():
        assert getattr(vae, name) == getattr(teacher, name), name
    if variant == "taeltx_2":
        assert vae.latents_mean.shape == teacher.latents_mean.shape == (128,)


def test_a_draw_takes_as_many_random_numbers_as_the_teachers() -> None:
    teacher, vae = small_teacher("taew2_1"), small_vae()
    clip = some_video(vae, length=5)
    after = []
    for one in (teacher, vae):
        generator = torch.Generator().manual_seed(7)
        one.encode(clip).latent_dist.sample(generator)
        after.append(torch.rand(1, generator=generator))
    assert torch.equal(*after)
    distribution = vae.encode(clip, return_dict=False)[0]
    assert torch.equal(distribution.sample(torch.Generator().manual_seed(7)), distribution.mode())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    vae = small_vae()
    z = some_latents(vae)
    exact = vae.decode(z).sample
    found = vae.to(dtype).decode(z.to(dtype)).sample
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), exact, atol=0.05, rtol=0)


# the fused copy


def test_the_fused_codec_runs_and_follows_the_weights() -> None:
    vae = small_vae()
    z = some_latents(vae)
    first = vae.decode(z).sample
    codec = vae._fused[1]
    assert isinstance(codec, FusedTAEHV)
    vae.decode(z)
    assert vae._fused[1] is codec, "it is built once"
    vae.decoder[-1].bias.add_(0.1)  # as an optimizer does
    changed = vae.decode(z).sample
    assert not torch.allclose(changed, first, atol=1e-2)
    vae.decoder[-1].bias = torch.nn.Parameter(torch.full((3,), 0.5))
    torch.testing.assert_close(vae.decode(z).sample, first)
    vae.to(memory_format=torch.channels_last)  # new storage, same values
    torch.testing.assert_close(vae.decode(z).sample, first)
    vae.load_state_dict(small_vae().state_dict() | {"decoder.22.bias": torch.full((3,), 0.2)})
    assert not torch.allclose(vae.decode(z).sample, changed, atol=1e-2)
    vae.to(torch.bfloat16)
    assert vae._fused is None, "a copy on the old device or in the old dtype is discarded"
    assert vae.decode(z).sample.dtype == torch.bfloat16 and vae._fused[1].dtype == torch.bfloat16
    vae.to("meta")  # the other device that every machine has
    assert vae._fused is None


def test_copies_do_not_share_weights() -> None:
    vae = small_vae()
    z = some_latents(vae)
    first = vae.decode(z).sample
    other = copy.deepcopy(vae)
    other.decoder[-1].bias.add_(0.1)
    assert torch.equal(vae.decode(z).sample, first) and not torch.equal(other.decode(z).sample, first)
    stream = io.BytesIO()
    torch.save(vae, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False).decode(z).sample, first)


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        vae = small_vae()
        first = vae.decode(some_latents(vae)).sample
    torch.testing.assert_close(vae.decode(some_latents(vae)).sample, first)


def test_a_compiled_call_is_the_same() -> None:
    """Users compile the VAE of a pipeline; the fused codec stays out of the graph."""
    vae = small_vae()
    z = some_latents(vae)
    with torch.no_grad():
        first = torch.compile(vae.decode, backend="eager")(z).sample
        video = torch.compile(vae.encode, backend="eager")(first).latent_dist.mode()
    torch.testing.assert_close(first, vae.decode(z).sample)
    torch.testing.assert_close(video, vae.encode(first).latent_dist.mode())


def test_gradients_after_inference_mode() -> None:
    """What is kept from a call in inference mode must not meet autograd."""
    vae = AutoencoderTinyVideo("taew2_1", width=0.125, latents_mean=[0.375] * 16, latents_std=[1.625] * 16)
    z = torch.randn(1, 16, 2, 2, 2)
    with torch.inference_mode():
        vae.decode(z)
    with torch.enable_grad():
        vae.decode(z.requires_grad_()).sample.sum().backward()
    assert z.grad is not None and z.grad.abs().sum() > 0


def test_gradients_are_recorded_where_they_are_wanted() -> None:
    vae = small_vae().train()
    z = some_latents(vae)
    exact = vae.decode(z).sample
    with torch.enable_grad():
        video = vae.decode(z).sample
        torch.testing.assert_close(video.detach().clamp(-1, 1), exact, atol=2e-5, rtol=0)
        video.square().mean().backward()
    assert vae.decoder[-1].weight.grad is not None
    plain = vae.decoder[3].conv[0].weight.grad.clone()
    vae.zero_grad()
    vae.enable_gradient_checkpointing()
    with torch.enable_grad():
        vae.decode(z).sample.square().mean().backward()
    torch.testing.assert_close(vae.decoder[3].conv[0].weight.grad, plain)
    vae.requires_grad_(False)
    wanted = z.clone().requires_grad_(True)
    with torch.enable_grad():
        vae.decode(wanted).sample.mean().backward()  # a reward, through frozen weights
        assert vae.encode(some_video(vae)).latent_dist.mode().requires_grad is False
    assert wanted.grad is not None


def test_a_round_trip() -> None:
    vae = small_vae()
    clip = some_video(vae)
    expected = vae.decode(vae.encode(clip).latent_dist.mode()).sample
    assert torch.equal(vae(clip).sample, expected)
    assert torch.equal(vae(clip, sample_posterior=True, return_dict=False)[0], expected)


# switches


@pytest.mark.parametrize("variant", ["taew2_1", "taecvx", "taeltx_2", "taeh3"])
def test_tiling_runs_a_few_latents_at_a_time(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vae = small_vae(variant)
    z, clip = some_latents(vae, length=7), some_video(vae, length=39)
    video, latents = vae.decode(z).sample, vae.encode(clip).latent_dist.mode()
    sizes: list[int] = []
    for side in ("encode_chunk", "decode_chunk"):
        run = getattr(FusedTAEHV, side)

        def watched(self: FusedTAEHV, x: Tensor, state: object, run: Any = run) -> Any:
            sizes.append(x.shape[1])
            return run(self, x, state)

        monkeypatch.setattr(FusedTAEHV, side, watched)
    monkeypatch.setattr(FusedTAEHV, "stream_chunk_latents", lambda *_, **__: 2)
    vae.enable_tiling(tile_sample_min_height=256)
    torch.testing.assert_close(vae.decode(z).sample, video, atol=2e-5, rtol=0)
    assert max(sizes) == 2 and len(sizes) == 4
    sizes.clear()
    torch.testing.assert_close(vae.encode(clip).latent_dist.mode(), latents, atol=2e-5, rtol=0)
    assert max(sizes) <= 2 * vae.spec.time_factor and len(sizes) >= 3
    vae.disable_tiling()
    sizes.clear()
    vae.decode(z)
    assert sizes == [7]


def test_slicing_runs_one_video_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = small_vae()
    z, clip = some_latents(vae, videos=3), some_video(vae, videos=3)
    video, latents = vae.decode(z).sample, vae.encode(clip).latent_dist.mode()
    assert len(video) == len(latents) == 3
    seen: list[int] = []
    decode_video = FusedTAEHV.decode_video
    monkeypatch.setattr(FusedTAEHV, "decode_video", lambda self, x: seen.append(len(x)) or decode_video(self, x))
    vae.enable_slicing()
    torch.testing.assert_close(vae.decode(z).sample, video, atol=2e-5, rtol=0)
    torch.testing.assert_close(vae.encode(clip).latent_dist.mode(), latents, atol=2e-5, rtol=0)
    assert seen == [1, 1, 1]
    vae.disable_slicing()
    vae.decode(z)
    assert seen[3:] == [3]


# files


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_gives_the_same_vae_back(variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vae = small_vae(variant, scaling_factor=0.3, invert_scale_latents=True)
    vae.save_pretrained(tmp_path)
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        loaded = AutoencoderTinyVideo.from_pretrained(tmp_path)
    diffusers.utils.logging.disable_propagation()
    assert not caplog.records, "every key of the config is known"
    public = {key: value for key, value in vae.config.items() if not key.startswith("_")}
    assert public == {key: value for key, value in loaded.config.items() if not key.startswith("_")}
    assert loaded.config.scaling_factor == 0.3 and loaded.config.invert_scale_latents is True
    z = some_latents(vae)
    torch.testing.assert_close(loaded.decode(z).sample, vae.decode(z).sample, atol=1e-6, rtol=0)
    assert not loaded.training


def test_a_config_gives_the_same_vae() -> None:
    vae = AutoencoderTinyVideo("taew2_1", WIDTH, [0.5] * 16, latent_space="vae")  # by place and by name
    again = AutoencoderTinyVideo.from_config(vae.config)
    assert again.spec == vae.spec == get_spec("taew2_1", width=WIDTH, latent_space="vae")
    assert torch.equal(again.latents_mean, vae.latents_mean)


@pytest.mark.parametrize("form", [None, "fp16"])
def test_half_precision_can_be_loaded(tmp_path: Path, form: str | None) -> None:
    """``form`` is the word in the file's name; diffusers calls it variant."""
    vae = small_vae(latent_space="vae")
    vae.half().save_pretrained(tmp_path, variant=form)
    loaded = AutoencoderTinyVideo.from_pretrained(tmp_path, variant=form, torch_dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.network.dtype == torch.bfloat16
    assert loaded.decode(some_latents(loaded)).sample.dtype == torch.bfloat16
    assert load_model(tmp_path).spec == loaded.spec == vae.spec


def test_a_device_map_can_be_named(tmp_path: Path) -> None:
    vae = small_vae()
    vae.save_pretrained(tmp_path)
    loaded = AutoencoderTinyVideo.from_pretrained(tmp_path, device_map="cpu")
    z = some_latents(vae)
    torch.testing.assert_close(loaded.decode(z).sample, vae.decode(z).sample, atol=1e-6, rtol=0)


def test_auto_model_finds_the_class(tmp_path: Path) -> None:
    if "auto_map" not in inspect.getsource(diffusers.AutoModel):
        pytest.skip(f"AutoModel of diffusers {diffusers.__version__} knows no class but its own")
    vae = small_vae("taehv1_5")
    vae.save_pretrained(tmp_path)
    loaded = diffusers.AutoModel.from_pretrained(str(tmp_path), trust_remote_code=True)
    assert type(loaded) is AutoencoderTinyVideo and loaded.spec == vae.spec


def test_a_tinyvae_model_or_file_becomes_a_vae(tmp_path: Path) -> None:
    model = TAEHV("taehv", width=WIDTH).to(torch.float16)
    save_model(model, tmp_path / "small.safetensors")
    for source in (model, tmp_path / "small.safetensors", str(tmp_path / "small.safetensors")):
        vae = AutoencoderTinyVideo.from_tinyvae(source)
        assert vae.spec == get_spec("taehv", width=WIDTH) and vae.dtype == torch.float16 and not vae.training
        assert torch.equal(vae.decoder[-1].weight, model.decoder[-1].weight)
    vae.decoder[-1].weight.zero_()
    assert model.decoder[-1].weight.any(), "the weights are a copy"
    vae = AutoencoderTinyVideo.from_tinyvae(tmp_path / "small.safetensors", variant="taecvx", scaling_factor=1.15258426)
    assert (vae.spec.name, vae.config.scaling_factor) == ("taecvx", 1.15258426)


# the teacher's statistics


def test_statistics_come_from_the_teacher() -> None:
    teacher = small_teacher("taeltx_2")
    teacher.latents_mean.copy_(torch.randn(128))
    teacher.latents_std.copy_(torch.rand(128) + 0.5)
    vae = AutoencoderTinyVideo.from_tinyvae(TAEHV("taeltx_2", width=WIDTH), teacher=teacher)
    assert torch.equal(vae.latents_mean, teacher.latents_mean) and torch.equal(vae.latents_std, teacher.latents_std)
    again = AutoencoderTinyVideo.from_tinyvae(TAEHV("taeltx_2", width=WIDTH), teacher=vae)
    assert again.config.latents_mean == vae.config.latents_mean
    qwen = diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1)
    vae = AutoencoderTinyVideo.from_tinyvae(TAEHV("taew2_1", width=WIDTH), teacher=qwen)
    assert (vae.config.latents_std, vae.config.scaling_factor) == (qwen.config.latents_std, 1.0)
    with pytest.warns(UserWarning, match=r"teacher=pipe\.vae"):
        AutoencoderTinyVideo.from_tinyvae(TAEHV("taeltx_2", width=WIDTH))


def test_a_teacher_of_another_latent_space_is_refused() -> None:
    with pytest.raises(UserError, match="another latent space than Wan 2"):
        AutoencoderTinyVideo.from_tinyvae(TAEHV("taew2_1", width=WIDTH), teacher=small_teacher("taehv"))
    with pytest.raises(UserError, match=r"16 latent channels.*8x in space, and taew2_2 has 48"):
        AutoencoderTinyVideo.from_tinyvae(TAEHV("taew2_2", width=WIDTH), teacher=small_teacher("taew2_1"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"variant": "taew2"}, "Did you mean"),
        ({"variant": "taew2_1", "latents_mean": [0.0] * 3}, "taew2_1 was given 3 latents_mean for 16"),
        ({"variant": "taew2_1", "latents_std": [0.0] * 16}, "not above 0"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        AutoencoderTinyVideo(width=WIDTH, **options)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_the_layout_of_diffusers_is_told(with_gradients: bool) -> None:
    """tinyvae's own layout is N T C H W, and images have four dimensions."""
    vae = small_vae()
    with torch.set_grad_enabled(with_gradients):
        for video in (torch.rand(1, 9, 3, 16, 16), torch.rand(1, 3, 16, 16)):
            with pytest.raises(UserError, match=r"N C T H W with 3 channels, got shape .*video with T = 1"):
                vae.encode(video)
        with pytest.raises(UserError, match=r"with 16 channels, got shape \(1, 3, 16, 2, 2\)"):
            vae.decode(torch.rand(1, 3, 16, 2, 2))
        with pytest.raises(UserError, match="16x16 or 24x16"):
            vae.encode(torch.rand(1, 3, 9, 20, 16))


def test_a_preview_is_refused() -> None:
    with pytest.raises(UserError, match="without preview="):
        AutoencoderTinyVideo.from_tinyvae(TAEHV("taehv", width=WIDTH, preview="time"))


# offload


def test_model_offload_moves_the_weights_before_each_call() -> None:
    accelerate = pytest.importorskip("accelerate")
    vae = small_vae()
    z, clip = some_latents(vae), some_video(vae)
    video = vae.decode(z).sample
    vae, hook = accelerate.cpu_offload_with_hook(vae, execution_device="cpu")
    moves: list[str] = []
    before = vae._hf_hook.pre_forward
    vae._hf_hook.pre_forward = lambda module, *rest, **options: moves.append("in") or before(module, *rest, **options)
    assert torch.equal(vae.decode(z).sample, video)
    vae.encode(clip)
    assert moves == ["in", "in"], "encode and decode both call the hook"
    assert vae._fused is not None
    codec = vae._fused[1]
    vae.decode(z)
    assert vae._fused[1] is codec, "a move to where the weights are costs nothing"
    hook.offload()
    assert torch.equal(vae.decode(z).sample, video)


def test_sequential_offload_brings_the_weights_for_one_call() -> None:
    accelerate = pytest.importorskip("accelerate")
    vae = small_vae()
    z, clip = some_latents(vae, length=5), some_video(vae)
    video, latents = vae.decode(z).sample, vae.encode(clip).latent_dist.mode()
    accelerate.cpu_offload(vae, execution_device="cpu")
    assert all(weight.is_meta for weight in vae.parameters())
    torch.testing.assert_close(vae.decode(z).sample, video)
    torch.testing.assert_close(vae.encode(clip).latent_dist.mode(), latents)
    vae.enable_tiling()
    torch.testing.assert_close(vae.decode(z).sample, video)
    assert vae._fused is None and all(weight.is_meta for weight in vae.parameters())


def test_what_cannot_help_is_refused_or_left_out() -> None:
    vae = small_vae()
    with pytest.raises(ValueError, match="group offloading"):
        vae.enable_group_offload(torch.device("cpu"))
    vae.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert {weight.dtype for weight in vae.parameters()} == {torch.float32}


def test_without_diffusers_one_sentence_says_what_to_install() -> None:
    code = "import sys; sys.modules['diffusers'] = None; import tinyvae.diffusers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'tinyvae[diffusers]'" in done.stderr.splitlines()[-1]


def test_the_signatures_of_diffusers() -> None:
    """decode(z, timestep, return_dict=False) as LTX calls it; keywords of other decoders are taken."""
    vae = small_vae("taeltx_2")
    z = some_latents(vae)
    assert torch.equal(vae.decode(z, torch.zeros(1), return_dict=False)[0], vae.decode(z, causal=False).sample)

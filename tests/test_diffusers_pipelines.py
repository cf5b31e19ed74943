"""Real pipelines of diffusers with our VAE in the teacher's place: their frames are those of our own codec.

A pipeline runs twice with one seed: once it hands over its latents, once the frames that it had the VAE make of them.
The frames must be those that the plain network makes of the same latents, which knows nothing of diffusers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.documents import FENCE, ROOT
from tinyvae import TAEHV, VARIANTS, save_model

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from tests import tiny_pipelines  # noqa: E402 (needs both packages)
from tinyvae.diffusers import AutoencoderTinyVideo  # noqa: E402

pytestmark = pytest.mark.slow
WIDTH = 0.125


def network(variant: str) -> TAEHV:
    torch.manual_seed(3)
    model = TAEHV(variant, width=WIDTH).eval()
    with torch.no_grad():
        model.decoder[-1].bias.fill_(0.5)  # pictures, not black
        model.decoder[-1].weight.mul_(8)
    return model


def vae_of(model: TAEHV) -> AutoencoderTinyVideo:
    """Our VAE with the statistics of a real one; LTX's, which are among its weights, are made up."""
    options: dict[str, Any] = {}
    if model.spec.name.startswith("taeltx"):
        generator = torch.Generator().manual_seed(4)
        options["latents_mean"] = torch.randn(128, generator=generator).tolist()
        options["latents_std"] = (0.5 + torch.rand(128, generator=generator)).tolist()
    vae = AutoencoderTinyVideo(model.spec.name, width=WIDTH, **options)
    vae.load_state_dict(model.state_dict())
    return vae.eval()


def by_time(latents_NCTHW: Tensor, pipe: Any) -> Tensor:
    return latents_NCTHW.transpose(1, 2)


def as_it_is(latents_NTCHW: Tensor, pipe: Any) -> Tensor:
    return latents_NTCHW


def unpacked_ltx(latents: Tensor, pipe: Any) -> Tensor:
    return pipe._unpack_latents(latents, 3, 2, 2, 1, 1).transpose(1, 2)


def normalized_ltx_2(z_NCTHW: Tensor, pipe: Any) -> Tensor:
    """This pipeline hands over the VAE's own latents."""
    mean, std = (torch.tensor(pipe.vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    return ((z_NCTHW - mean) / std).transpose(1, 2)


def unpacked_qwen(latents: Tensor, pipe: Any) -> Tensor:
    return pipe._unpack_latents(latents, 32, 32, 8).transpose(1, 2)


# name -> diffusers' class, variant, how its latents become ours, frames
PIPELINES: dict[str, tuple[str, str, Callable[[Tensor, Any], Tensor], int]] = {
    "wan": ("WanPipeline", "taew2_1", by_time, 9),
    "wan_2_2": ("WanPipeline", "taew2_2_super", by_time, 9),
    "wan_image": ("WanImageToVideoPipeline", "taew2_1", by_time, 9),
    "hunyuan": ("HunyuanVideoPipeline", "taehv", by_time, 9),
    "hunyuan_1_5": ("HunyuanVideo15Pipeline", "taehv1_5", by_time, 9),
    "hunyuan_1_5_image": ("HunyuanVideo15ImageToVideoPipeline", "taehv1_5", by_time, 9),
    "cogvideox": ("CogVideoXPipeline", "taecvx", as_it_is, 9),
    "cogvideox_image": ("CogVideoXImageToVideoPipeline", "taecvx", as_it_is, 9),
    "ltx_image": ("LTXImageToVideoPipeline", "taeltx_2", unpacked_ltx, 17),
    "ltx_2": ("LTX2Pipeline", "taeltx2_3", normalized_ltx_2, 17),
    "qwen_image": ("QwenImagePipeline", "taew2_1", unpacked_qwen, 1),
}


def build(name: str) -> tuple[TAEHV, Any, dict[str, Any]]:
    """(the plain network, a pipeline with our VAE of it, the arguments of a call)."""
    class_name, variant, *_ = PIPELINES[name]
    if not hasattr(diffusers, class_name):
        pytest.skip(f"diffusers {diffusers.__version__} has no {class_name}")
    model = network(variant)
    builder = getattr(tiny_pipelines, name.removesuffix("_2_2"))
    pipe, call = builder(vae_of(model))
    pipe.set_progress_bar_config(disable=True)
    return model, pipe, call


def run(pipe: Any, call: dict[str, Any], output_type: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    made = pipe(**call, num_inference_steps=2, output_type=output_type, generator=generator)[0]
    return made.unsqueeze(1) if made.ndim == 4 else made  # an image is a video of one frame


@pytest.mark.parametrize("name", PIPELINES)
def test_frames_are_those_of_our_codec(name: str) -> None:
    *_, to_ours, num_frames = PIPELINES[name]
    model, pipe, call = build(name)
    latents = pipe(**call, num_inference_steps=2, output_type="latent", generator=torch.Generator().manual_seed(0))[0]
    expected = model.decode_video(to_ours(latents, pipe))
    found = run(pipe, call, "pt")
    assert found.shape == expected.shape and found.shape[1] == num_frames
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert found.std() > 0.02 and ((found > 0) & (found < 1)).float().mean() > 0.3, "pictures, not clamped values"


def transformer_input(pipe: Any, call: dict[str, Any]) -> Tensor:
    """What the transformer is given at the first step."""
    seen: list[Tensor] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, options: seen.append(options["hidden_states"] if not args else args[0]), with_kwargs=True
    )
    run(pipe, call, "latent")
    hook.remove()
    return seen[0]


def picture_frames(size: int, num_frames: int) -> Tensor:
    """The picture of an image-to-video call, NTCHW in [0, 1], then gray frames."""
    pixels = torch.frombuffer(bytearray(tiny_pipelines.picture(size, size).tobytes()), dtype=torch.uint8)
    frames = torch.full((1, num_frames, 3, size, size), 0.5)
    frames[:, 0] = pixels.view(size, size, 3).permute(2, 0, 1) / 255
    return frames


def test_wan_is_conditioned_on_our_latents_of_the_picture() -> None:
    model, pipe, call = build("wan_image")
    given = transformer_input(pipe, call)[:1, -16:]
    torch.testing.assert_close(given, model.encode_video(picture_frames(32, 9)).transpose(1, 2), atol=2e-5, rtol=0)


@pytest.mark.parametrize("inverted", [False, True])
def test_cogvideox_is_conditioned_on_our_latents_of_the_picture(inverted: bool) -> None:
    model, pipe, call = build("cogvideox_image")
    pipe.vae.register_to_config(invert_scale_latents=inverted)
    given = transformer_input(pipe, call)[:1, :, 16:]
    expected = model.encode_video(picture_frames(32, 1)) / (0.7**2 if inverted else 1)
    torch.testing.assert_close(given[:, :1], expected, atol=2e-5, rtol=0)
    assert not given[:, 1:].any()


def test_hunyuan_1_5_is_conditioned_on_our_latents_of_the_picture() -> None:
    model, pipe, call = build("hunyuan_1_5_image")
    given = transformer_input(pipe, call)[:1, 32:64]
    torch.testing.assert_close(
        given[:, :, :1], model.encode_video(picture_frames(64, 1)).transpose(1, 2), atol=2e-5, rtol=0
    )


def test_minimax_h3_is_conditioned_on_our_latents_of_a_picture() -> None:
    """Its pipeline is modular; this is its step from a picture to latents."""
    encoders = pytest.importorskip("diffusers.modular_pipelines.minimax_h3.encoders")
    model = network("taeh3")
    frames = picture_frames(32, 1)
    pixels = (frames.transpose(1, 2) * 255).round().to(torch.uint8)
    imagenet = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    given = encoders.encode_vae_condition(vae_of(model), pixels, *imagenet)
    assert given.shape == (1, 24, 1, 2, 2)
    expected = model.encode_video(frames)[:, :1].transpose(1, 2)
    torch.testing.assert_close(given, expected, atol=2e-3, rtol=0)  # the step rounds latents to float16


def test_minimax_h3_decodes_with_our_vae() -> None:
    """Its modular step from latents to frames, whose pixels are normalized as ImageNet's."""
    decoders = pytest.importorskip("diffusers.modular_pipelines.minimax_h3.decoders")
    model = network("taeh3")
    pipe = decoders.MiniMaxH3VideoDecodeStep().init_pipeline()
    pipe.update_components(vae=vae_of(model))
    latents = torch.randn(1, 24, 7, 2, 2)
    found = pipe(latents=latents, output_type="pt", output="videos")
    assert found.shape == (1, 22, 3, 32, 32)
    torch.testing.assert_close(found, model.decode_video(latents.transpose(1, 2)), atol=2e-5, rtol=0)


class ShortPipeline:
    """A pipeline that makes its tiny video whatever size it is asked for."""

    def __init__(self, pipe: Any, call: dict[str, Any]) -> None:
        self.__dict__.update(inner=pipe, call=call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.inner, name, value)

    def __call__(self, prompt: str, **options: Any) -> Any:
        assert isinstance(prompt, str)
        return self.inner(**self.call, num_inference_steps=1, **options)


def document_blocks() -> list[str]:
    blocks = [body for kind, body in FENCE.findall((ROOT / "docs" / "diffusers.md").read_text()) if kind == "python"]
    assert len(blocks) >= 9
    return blocks


@pytest.mark.parametrize("block", document_blocks(), ids=lambda block: block.splitlines()[-1][:40])
def test_the_code_of_the_document_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/diffusers.md, with tiny pipelines in place of what it would download."""
    monkeypatch.chdir(tmp_path)
    for variant in VARIANTS:
        if f'"{variant}.safetensors"' in block:
            save_model(network(variant), tmp_path / f"{variant}.safetensors")
    for name, (class_name, *_) in PIPELINES.items():
        if class_name in block and name != "wan_2_2":
            _, pipe, call = build(name)
            short = ShortPipeline(pipe, call)
            monkeypatch.setattr(getattr(diffusers, class_name), "from_pretrained", lambda *_, short=short, **__: short)
    if "DiffusionPipeline" in block:
        build("wan")[1].save_pretrained(tmp_path / "my_pipeline")
    exec(compile(block.replace('"cuda"', '"cpu"'), "docs/diffusers.md", "exec"), {})


def test_a_pipeline_is_saved_and_loaded_with_our_vae(tmp_path: Path) -> None:
    _, pipe, call = build("wan")
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["vae"] == [
        "tinyvae.diffusers",
        "AutoencoderTinyVideo",
    ]
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.vae) is AutoencoderTinyVideo
    torch.testing.assert_close(run(loaded, call, "pt"), run(pipe, call, "pt"), atol=2e-5, rtol=0)
    vae = diffusers.AutoModel.from_pretrained(str(tmp_path), subfolder="vae")
    assert type(vae) is AutoencoderTinyVideo and vae.spec == pipe.vae.spec


def test_the_vae_can_be_changed_in_a_running_pipeline() -> None:
    """``pipe.vae = ...`` with the statistics of the VAE that was there."""
    teacher = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, scaling_factor=0.9
    )
    pipe, call = tiny_pipelines.cogvideox(teacher)
    pipe.set_progress_bar_config(disable=True)
    model = network("taecvx")
    assert run(pipe, call, "pt").shape == (1, 9, 3, 32, 32)
    pipe.vae = AutoencoderTinyVideo.from_tinyvae(model, teacher=pipe.vae)
    found = run(pipe, call, "pt")
    torch.testing.assert_close(found, model.decode_video(run(pipe, call, "latent")), atol=2e-5, rtol=0)

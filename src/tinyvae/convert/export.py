"""Write a model as another program loads it, and check the result under that program's rules.

`programs` says what each program takes, `readers` reads a weights file back as the program does, `onnx` writes graphs.
Nothing gets its name before the check: a file that would decode wrongly is never left behind.

    from tinyvae import export
    print(export("output/my_run", to="comfyui", output="ComfyUI/models/vae_approx").message)
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyvae.convert import programs, readers
from tinyvae.convert.pixel_range import to_signed_pixels, to_unit_pixels
from tinyvae.convert.programs import Program, Slot
from tinyvae.engines.fused import FusedTAEHV
from tinyvae.errors import UserError
from tinyvae.files import check_output_file, make_output_folder, refuse_existing, writing_to
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import H3_CHUNK_FRAMES, VARIANTS, VariantSpec
from tinyvae.models.weights import load_model, plain_state, save_model
from tinyvae.storage import Place, place_of
from tinyvae.teachers.statistics import pixel_normalization

if TYPE_CHECKING:
    from tinyvae.convert.int8 import Int8Check
    from tinyvae.diffusers import AutoencoderTinyVideo

TOLERANCE = 1e-4
"""Largest difference, relative to the largest value: the same arithmetic in another order, in float32."""
HALF_TOLERANCE = 2e-2
"""For graphs in float16, where each layer rounds."""
CHECK_SIZE = (3, 4)  # height and width of the latents that a check sends through


class ExportMismatchError(RuntimeError):
    """The written file, read as the program reads it, is not the model. A bug of ours: nothing was left behind."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export wrote.

    ``rounding_db``: PSNR between the frames of the model and those of its weights in the written dtype, on random
    latents; infinite where nothing was rounded. For int8 on frames of the user's videos. ``speedup``: of an int8
    decoder over the float32 one, on one core of this CPU. ``message``: one line for the user: the file, and where it
    goes.
    """

    files: tuple[Path, ...]
    dtype: str
    rounding_db: float
    message: str
    speedup: float | None = None


Written: TypeAlias = "tuple[list[Path], Int8Check | None]"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What an export writes, and where. ``data``: the videos for int8."""

    program: Program
    slot: Slot
    target: Path
    dtype: str
    overwrite: bool
    data: Place | None

    @property
    def weights_dtype(self) -> str:
        """The dtype that the weights are rounded to; an int8 graph is made from a float32 one."""
        return "float32" if self.dtype == "int8" else self.dtype


def export(
    model: TAEHV | str | os.PathLike[str],
    to: str,
    output: str | os.PathLike[str],
    *,
    slot: str | None = None,
    dtype: str | None = None,
    data: Place | str | None = None,
    variant: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a model for another program; raises `UserError` with the reason and the way out where it cannot work.

    ``to``: comfyui, diffusers, lightx2v, sdcpp, upstream, onnx, web. ``output``: a file, or a folder in which the file
    gets the name that the program looks for; for diffusers, onnx and web a folder. ``slot``: "preview" for ComfyUI's
    live preview. ``dtype``: "float16", "bfloat16" or "float32"; the default is what the program wants. ``variant``: for
    a path whose file does not state it.

    For onnx and web ``dtype`` can be "int8": the decoder's convolutions. ``data`` is then a video or a folder of videos
    (or annotations, or an index; a path or a URL) to calibrate on, like those that will be decoded.

    Example: ``export(model, to="sdcpp", output="taew2_2.safetensors").files``.
    """
    program = programs.get_program(to)
    if isinstance(model, FusedTAEHV):  # its weights are folded
        raise UserError("a fused codec cannot be exported; export the model that it was made of.")
    if not isinstance(model, TAEHV):
        model = load_model(model, variant=variant)
    chosen = programs.choose_slot(program, model.spec, name=slot)
    plan = _Plan(
        program=program,
        slot=chosen,
        target=programs.output_file(program, chosen, Path(output)),
        dtype=programs.check_dtype(program, chosen, dtype, has_data=data is not None),
        overwrite=overwrite,
        data=None if data is None else place_of(data),
    )
    rounded = round_model(model, plan.weights_dtype, signed_pixels=chosen.signed_pixels)
    write = {"weights": _write_weights, "folder": _write_folder}.get(program.writes, _write_graphs)
    files, int8 = write(rounded, plan)
    if int8 is not None:
        decibels, note = int8.psnr_db, f" {int8.words()}"
    else:
        decibels = rounding_db(model, to_unit_pixels(rounded) if chosen.signed_pixels else rounded)
        note = "" if math.isinf(decibels) else f", {decibels:.0f} dB from the model's own weights"
    shown = plan.target if program.writes in ("folder", "page") else " and ".join(map(str, files))
    return Exported(
        files=tuple(files),
        dtype=plan.dtype,
        rounding_db=decibels,
        speedup=None if int8 is None else int8.speedup,
        message=f"wrote {shown} ({plan.dtype}{note}); {place_of_file(program, chosen, plan.target)}.",
    )


def round_model(model: TAEHV, dtype: str, *, signed_pixels: bool = False) -> TAEHV:
    """A copy on the CPU in float32 whose weights have been rounded to ``dtype``: what the program will have.

    ``signed_pixels``: it is for pixels in [-1, 1].
    """
    rounded = copy.deepcopy(model).to("cpu", torch.float32).eval().requires_grad_(False)
    rounded.gradient_checkpointing = rounded.folded_training = False
    if signed_pixels:  # in float32: in the model's own dtype it would round once more
        rounded = to_signed_pixels(rounded)
    rounded.to(getattr(torch, dtype)).float()
    for key, value in rounded.state_dict().items():
        if not value.isfinite().all():
            raise UserError(
                f"{key} has values that are not finite as {dtype}; choose another --dtype, or look at the model "
                "with `tinyvae eval`."
            )
    return rounded


def rounding_db(model: TAEHV, rounded: TAEHV) -> float:
    """PSNR in dB between the two models' frames of the same random latents; infinite where they are equal."""
    plain = copy.deepcopy(model).to("cpu", torch.float32)
    latents = random_latents(model.spec, 3)
    with torch.no_grad():
        error = (plain.decode_video(latents) - rounded.decode_video(latents)).square().mean().item()
    return -10 * math.log10(error) if error else math.inf


# weights


def _write_weights(rounded: TAEHV, plan: _Plan) -> Written:
    slot, target, dtype = plan.slot, plan.target, getattr(torch, plan.dtype)
    check_path(plan.program, slot, target)
    check_output_file(target, option="--output")
    refuse_existing([] if plan.overwrite else [target])
    with _draft_folder(target.parent) as folder:
        draft = folder / target.name
        if slot.signed_pixels:  # without a statement: it would be untrue, because our own models are for [0, 1]
            state = plain_state(rounded, dtype=dtype)
            torch.save(state, draft) if draft.suffix == ".pth" else save_file(state, draft)
            rounded = to_unit_pixels(rounded)
        else:
            save_model(rounded, draft, dtype=dtype)
        check_weights(draft, target, plan.program, slot, rounded)
    return [target], None


def check_path(program: Program, slot: Slot, file: Path) -> None:
    """Refuse a path that the program would take for something else."""
    path = str(file.absolute())
    if program is programs.LIGHTX2V:
        is_vae_space = slot.latent_space == "vae"
        if ("lighttae" in path) != is_vae_space:
            word = "needs" if is_vae_space else "must not have"
            where = "" if is_vae_space else ", in a folder without that word"
            raise UserError(
                f"LightX2V takes a path with 'lighttae' in it for a network with VAE-space latents, so {path} {word} "
                f"that word; call the file {slot.file_name}{where}."
            )
        if "taecvx" in path:
            raise UserError(f"LightX2V counts frames as for CogVideoX where the path has 'taecvx': rename {path}.")
    if program is programs.COMFYUI and slot.name == "preview":
        stem = slot.file_name.removesuffix("_preview.safetensors")
        if not file.name.startswith(stem) or file.stem == stem:
            raise UserError(
                f"ComfyUI's preview looks for a name that begins with {stem}, and its VAE loader for exactly {stem}, "
                f"where this network would decode wrongly; call the file {slot.file_name}."
            )
    if program is programs.UPSTREAM:
        wanted = readers.upstream_reading({}, Path(slot.file_name), slot.variant)
        if readers.upstream_reading({}, Path(path), slot.variant) != wanted:
            raise UserError(
                f"upstream's class tells the variant by words in the whole path, and would not take {path} for "
                f"{slot.variant}; call the file {slot.file_name}, in a folder without the name of another variant."
            )


def place_of_file(program: Program, slot: Slot, target: Path) -> str:
    """Where to put the file, and what it does there: one sentence without its full stop."""
    place = slot.place
    if program is programs.COMFYUI and slot.name == "vae" and target.name != slot.file_name:
        # Its VAE loader looks into vae_approx for the known names alone.
        place = next(other.place for other in program.slots if "models/vae:" in other.place)
    shown = target if program.writes != "weights" or program in (programs.LIGHTX2V, programs.SDCPP) else target.name
    return place.format(file=shown, teacher=VARIANTS[slot.variant].teacher)


def check_weights(written: Path, target: Path, program: Program, slot: Slot, rounded: TAEHV) -> None:
    """Read a file as the program would read ``target``, and compare its frames and latents with the model's."""
    is_pickled = written.suffix == ".pth"
    state = torch.load(written, map_location="cpu", weights_only=True) if is_pickled else load_file(written)
    assert len({value.dtype for value in state.values()}) == 1, f"{written} mixes dtypes"
    try:
        reading = readers.READINGS[program.name](state, target.absolute(), slot.variant)
        readers.check_shapes(state, reading)
    except readers.UnreadableByProgramError as fault:
        raise ExportMismatchError(f"{program.title} cannot read the file: {fault}; nothing was written.") from None
    state = {key: value.float() for key, value in state.items()}
    with torch.no_grad():
        for num_latents in (2, 7) if rounded.spec.frame_rule == "chunked" else (2, 3):
            latents = random_latents(rounded.spec, num_latents)
            made = readers.read_decode(state, reading, latents / slot.handed_scale)
            _compare("frames", made, rounded.decode(latents), program, TOLERANCE)
        frames = random_frames(rounded.spec)
        # The encoder for [-1, 1] equals ours where the frame goes on in black (see `pixel_range`).
        made = readers.read_encode(state, reading, frames, border=-1.0 if slot.signed_pixels else 0.0)
        _compare("latents", made * slot.handed_scale, rounded.encode(frames), program, TOLERANCE)


# a folder of diffusers


def _write_folder(rounded: TAEHV, plan: _Plan) -> Written:
    from tinyvae.diffusers import AutoencoderTinyVideo

    make_output_folder(plan.target, option="--output")
    with _draft_folder(plan.target) as folder:
        vae = AutoencoderTinyVideo.from_tinyvae(copy.deepcopy(rounded).to(getattr(torch, plan.dtype)))
        vae.save_pretrained(folder)
        files = [plan.target / file.name for file in sorted(folder.iterdir())]
        refuse_existing([] if plan.overwrite else files)
        check_folder(AutoencoderTinyVideo.from_pretrained(folder, torch_dtype=torch.float32), rounded, plan.program)
    return files, None


def check_folder(vae: AutoencoderTinyVideo, rounded: TAEHV, program: Program) -> None:
    """Use a loaded VAE as a pipeline does, with the statistics of its config, and compare with the model."""
    spec, config = rounded.spec, vae.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    factor = config.scaling_factor
    if spec.latent_space == "vae":  # then the pipeline's latents are the network's own
        mean, std, factor = torch.zeros(()), torch.ones(()), 1.0
    latents, frames = random_latents(spec, 3), random_frames(spec)
    pixel_mean, pixel_std = (torch.tensor(v).view(1, 3, 1, 1, 1) for v in pixel_normalization(spec))
    with torch.no_grad():
        video = vae.decode(latents.transpose(1, 2) * std / factor + mean).sample
        made = (video * pixel_std + pixel_mean).transpose(1, 2)
        _compare("frames", made, rounded.decode_video(latents), program, TOLERANCE)
        z = vae.encode((frames.transpose(1, 2) - pixel_mean) / pixel_std).latent_dist.mode()
        made = ((z - mean) * factor / std).transpose(1, 2)
        _compare("latents", made, rounded.encode_video(frames), program, TOLERANCE)


# graphs


def _write_graphs(rounded: TAEHV, plan: _Plan) -> Written:
    from tinyvae.convert import int8, web
    from tinyvae.convert import onnx as graphs

    target, is_page = plan.target, plan.program.writes == "page"
    make_output_folder(target, option="--output")
    files = [target / name for name in (*graphs.FILES.values(), *(web.page_files() if is_page else []))]
    refuse_existing([] if plan.overwrite else files)
    runtime = web.find_runtime() if is_page else None
    videos = None if plan.data is None else int8.read_videos(plan.data, rounded.spec)
    with _draft_folder(target) as folder:
        sides = {side: folder / name for side, name in graphs.FILES.items()}
        for side, file in sides.items():
            graph = graphs.build_graph(rounded, side, getattr(torch, plan.weights_dtype))
            file.write_bytes(graph.SerializeToString())
        check_graphs(sides["encoder"], sides["decoder"], rounded, plan.program)
        checked = None if videos is None else int8.quantize_decoder(sides["decoder"], rounded, videos)
        if runtime is not None:
            facts: dict[str, Any] = {side: graphs.GraphStream(file).facts for side, file in sides.items()}
            web.write_page(folder, runtime, rounded, {"dtype": plan.dtype, **facts})
    return files, checked


def check_graphs(encoder: Path, decoder: Path, rounded: TAEHV, program: Program) -> None:
    """Stream a video through both graphs with onnxruntime, and compare with the model."""
    from tinyvae.convert import onnx as graphs

    spec = rounded.spec
    frames, latents = random_frames(spec), random_latents(spec, 3)
    tolerance = HALF_TOLERANCE if graphs.GraphStream(decoder).is_half else TOLERANCE
    made = graphs.stream_decode(decoder, latents, spec)
    _compare("frames", made, rounded.decode_video(latents), program, tolerance)
    made = graphs.stream_encode(encoder, frames, spec)
    _compare("latents", made, rounded.encode_video(frames), program, tolerance)


# shared


@contextmanager
def _draft_folder(target: Path) -> Iterator[Path]:
    """A hidden folder in ``target``. Its files move up at the end, and none does if something fails before."""
    with writing_to(target), tempfile.TemporaryDirectory(dir=target, prefix=".export-") as name:
        folder = Path(name)
        yield folder
        drafts = [file for file in folder.rglob("*") if file.is_file()]
        (folder / ".plain").touch()
        for draft in drafts:
            draft.chmod((folder / ".plain").stat().st_mode)  # safetensors lets nobody else read what it writes
            file = target / draft.relative_to(folder)
            file.parent.mkdir(exist_ok=True)
            os.replace(draft, file)


def random_latents(spec: VariantSpec, num_latents: int) -> Tensor:
    """Latents 1TCHW with the spread of diffusion latents, the same in every call."""
    generator = torch.Generator().manual_seed(num_latents)
    return torch.randn((1, num_latents, spec.latent_channels, *CHECK_SIZE), generator=generator)


def random_frames(spec: VariantSpec) -> Tensor:
    """Frames 1TCHW in [0, 1]: two latents' worth, or one chunk of taeh3; the same in every call."""
    num_frames = H3_CHUNK_FRAMES if spec.frame_rule == "chunked" else 2 * spec.time_factor
    height, width = (side * spec.space_factor for side in CHECK_SIZE)
    return torch.rand((1, num_frames, 3, height, width), generator=torch.Generator().manual_seed(0))


def _compare(what: str, made: Tensor, expected: Tensor, program: Program, tolerance: float) -> None:
    if made.shape != expected.shape:
        fault = f"have shape {list(made.shape)} instead of {list(expected.shape)}"
    else:
        error = (made - expected).abs().max().item() / max(1.0, expected.abs().max().item())
        if error <= tolerance:  # never where it is NaN
            return
        fault = f"differ from the model's by {error:.2g}"
    raise ExportMismatchError(f"read by the rules of {program.title}, the {what} {fault}; nothing was written.")

"""Checks before a long run: each is one line of `tinyvae check`, with a tick or with the fix.

The last ones take a real training step: on a GPU at full size, on a CPU with a few small clips, scaled by pixels.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distributions, requires
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import psutil
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch import Tensor

from tinyvae.cache_folder import GIB
from tinyvae.config.rules import DATA_KEYS, Complaint, GivenPath, path_complaints
from tinyvae.config.schema import TrainConfig
from tinyvae.data.annotations import default_data_root, iterate_entries
from tinyvae.data.index import VideoIndex, hash_of_path, is_index, open_index
from tinyvae.data.index_build import build_index, usable_cores
from tinyvae.data.latent_store import DTYPES, LatentStore, StoredLatents
from tinyvae.data.sizes import ClipSize
from tinyvae.errors import UserError
from tinyvae.files import existing_folder
from tinyvae.losses.perceptual import find_lpips_weights
from tinyvae.storage import Place, Url, file_cache, use_file_cache
from tinyvae.teachers.network import is_network
from tinyvae.terminal import bytes_in_words, count_of, duration_in_words
from tinyvae.training.build import build_model, build_task, open_latents
from tinyvae.training.checkpoint import checkpoint_bytes, list_checkpoints, state_bytes
from tinyvae.training.clips import (
    lack_of_files,
    lack_of_validation,
    lacks_sample_clips,
    list_of_videos,
    loading_processes,
    split_files,
)
from tinyvae.training.deepspeed import LaunchConfig
from tinyvae.training.engine import Engine
from tinyvae.training.guards import is_out_of_memory
from tinyvae.training.optim import make_optimizers
from tinyvae.training.run_folder import earlier_run_folders

OLDEST_DRIVER = (525, 60, 13)
SHOWN_PACKAGES = ("torch", "accelerate", "deepspeed", "diffusers", "av")
SAMPLED_FILES = 24
LISTED_FILES = 100_000
SPARE_SAVES = 3  # beside the kept ones: the one being written, the best, and the last emergency one
FULL_MEMORY = 0.95
LARGEST_CPU_STEP = 10_000_000  # pixels of all frames, at full model width; a larger step takes a CPU many minutes
SLOW_RUN_S = 3 * 86_400.0
NO_TEACHER: dict[str, Any] = {
    "use_ref_vae": False,
    "latent_store": None,
    "encoder_loss_weight": 0.0,
    "decoder_loss_weight": 0.0,
}
SMALL_SIDE = 64
SMALL_BATCH = 4
SAVE_MEMORY = "use --gradient_checkpointing true, a smaller --train_batch_size, fewer frames or smaller ones"


@dataclass(frozen=True, kw_only=True)
class Check:
    """``found``: what is there. ``fix``: what to do; empty if all is well. ``only_warns``: the run may start."""

    name: str
    found: str
    fix: str = ""
    only_warns: bool = False

    @property
    def passes(self) -> bool:
        return not self.fix or self.only_warns


def preflight(
    config: TrainConfig,
    given_paths: Mapping[str, GivenPath],
    *,
    processes: int,
    port: int | None = None,
    launch: LaunchConfig | None = None,
    with_step: bool = True,
) -> list[Check]:
    """All checks of settings that `load_config` accepts. ``processes``: on this machine; ``port``: where several
    processes meet (None: only one)."""
    use_file_cache(config.file_cache_dir, config.file_cache_gb)
    missing = path_complaints(config, given_paths)
    missing_keys = {key for complaint in missing for key in complaint.keys}
    checks = [*(_frames(config, size) for size in config.sizes.sizes), *_stages(config), *_launch(config, launch)]
    checks += [*_gpus(config, processes), _packages(config, launch)]
    checks += [Check(name="files", found="not as the settings say", fix=complaint.text) for complaint in missing]
    if not missing:
        checks += [Check(name="files", found="all that the settings name are there"), *_weights(config)]
    if not missing_keys & {"data_root", "annotation_file", "index_path"}:
        checks += [*_data(config), *_file_cache(config)]
    if "latent_store" not in missing_keys and (stored := _latents(config)) is not None:
        checks.append(stored)
        missing_keys |= set() if stored.passes else {"latent_store"}
    checks += [_disk(config, processes), *_port(port)]
    if with_step:
        checks += _trial_step(_without(config, missing_keys))
    return checks


def checks_at_start(config: TrainConfig, *, processes: int) -> list[Check]:
    """The checks that take no time: GPUs, driver, precision, disk, stages. Every run makes them on its main process."""
    return [*_stages(config), *_gpus(config, processes), _disk(config, processes)]


def print_table(checks: Iterable[Check], stream: TextIO | None = None) -> None:
    """One line for each check; the fix is on the next line."""
    rows, stream = list(checks), stream or sys.stdout
    has_ticks = (stream.encoding or "").lower().startswith("utf")
    good, warning, bad = ("✓", "!", "✗") if has_ticks else ("ok", "!!", "NO")
    width = max(len(check.name) for check in rows)
    for check in rows:
        mark = good if not check.fix else warning if check.only_warns else bad
        print(f" {mark:<2} {check.name:<{width}}  {check.found}", file=stream)
        if check.fix:
            print(f"    {'':<{width}}  fix: {check.fix}", file=stream)


def _stages(config: TrainConfig) -> Iterator[Check]:
    """A warning for each stage of ``resolutions`` that the run ends before."""
    for stage in config.sizes.stages:
        if stage.first_step >= config.max_train_steps:
            found = f"{stage.in_words()} begins at step {stage.first_step}, and the run has {config.max_train_steps}"
            fix = "raise --max_train_steps, or begin it earlier in --resolutions"
            yield Check(name="sizes", found=found, fix=fix, only_warns=True)


def _frames(config: TrainConfig, size: ClipSize) -> Check:
    """What the network makes of a training clip of one size."""
    spec, (n_frames, height, width) = config.spec, size
    frames = f"{count_of(n_frames, 'frame')} -> {count_of(spec.latents(n_frames), 'latent')} -> "
    frames += f"{count_of(spec.frames_out(n_frames), 'frame')} of {height}x{width}"
    if config.use_seraena:
        groups = spec.padded_frames(n_frames) // config.n_seraena_frames
        frames += f"; Seraena sees {count_of(groups, 'group')} of {config.n_seraena_frames}"
    return Check(name="frames", found=f"{config.variant}: {frames}")


def _launch(config: TrainConfig, launch: LaunchConfig | None) -> Iterator[Check]:
    if launch is not None:
        deepspeed = launch.deepspeed
        engine = "DDP" if deepspeed is None else f"DeepSpeed ZeRO-{deepspeed.zero_optimization.stage}"
        yield Check(name="launch", found=f"{engine}, {launch.place}", fix="; ".join(launch.disagreements(config)))


def machine_complaints(config: TrainConfig) -> list[Complaint]:
    """A complaint if the steps are made for GPUs and there is none: the run would take years."""
    clips = config.train_batch_size * config.gradient_accumulation_steps
    pixels = clips * config.n_frames * config.height * config.width * config.model_width**2
    if torch.cuda.is_available() or config.allow_cpu or pixels <= LARGEST_CPU_STEP:
        return []
    text = (
        f"no GPU is visible here, and one step of this run is {count_of(clips, 'clip')} of {config.n_frames} frames of "
        f"{config.height}x{config.width}, which takes a CPU many minutes; run it on a machine with a GPU, try it small "
        "with --height 64 --width 64 --train_batch_size 1 --gradient_accumulation_steps 1 --mixed_precision no "
        "--max_train_steps 4, or pass --allow_cpu true to train here all the same."
    )
    return [Complaint(keys=("allow_cpu",), text=text)]


def _gpus(config: TrainConfig, processes: int) -> Iterator[Check]:
    if not torch.cuda.is_available():
        fix = "; ".join(complaint.text for complaint in machine_complaints(config))
        yield Check(name="device", found=f"no GPU; {count_of(usable_cores(), 'CPU core')}", fix=fix)
        if config.mixed_precision != "no":
            found = f"{config.mixed_precision} is far slower than float32 on most CPUs"
            yield Check(name="precision", found=found, fix="use --mixed_precision no here", only_warns=True)
        return
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    kinds = sorted({f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in properties})
    lacking = f"{processes} are wanted: ask for at most {count}, or look at CUDA_VISIBLE_DEVICES"
    yield Check(name="GPUs", found=f"{count} x {' / '.join(kinds)}", fix=lacking if count < processes else "")
    file = Path("/proc/driver/nvidia/version")
    driver = parse_driver_version(file.read_text()) if file.is_file() else ()
    found = f"{'.'.join(map(str, driver)) or 'unknown'}; torch {torch.__version__} for CUDA {torch.version.cuda}"
    newer = f"install a driver of at least {'.'.join(map(str, OLDEST_DRIVER))}"
    yield Check(name="driver", found=found, fix=newer if () < driver < OLDEST_DRIVER else "", only_warns=True)
    if config.mixed_precision == "bf16":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        fix = "" if fast else "this GPU has no bf16: use --mixed_precision fp16 or no"
        yield Check(name="bf16", found="the GPU computes in it" if fast else "not on this GPU", fix=fix)


def parse_driver_version(text: str) -> tuple[int, ...]:
    """``... Kernel Module  525.60.13  ...`` -> (525, 60, 13); empty if there is none."""
    found = re.search(r"(?<=\s)\d{3}(\.\d+)+(?=\s)", text)
    return tuple(map(int, found.group().split("."))) if found else ()


def _packages(config: TrainConfig, launch: LaunchConfig | None) -> Check:
    """Whether the installed packages are those that tinyvae asks for, with the extras that this run needs."""
    extras = ["deepspeed"] if launch is not None and launch.deepspeed is not None else []
    extras += ["teachers"] if config.teacher_path is not None and not is_network(config.teacher_path) else []
    versions = {canonicalize_name(package.name): package.version for package in distributions()}
    if "tinyvae" not in versions:
        found = "tinyvae is not installed, only on the path"
        return Check(name="packages", found=found, fix="pip install -e .", only_warns=True)
    wanted = [Requirement(line) for line in requires("tinyvae") or []]
    wanted = [p for p in wanted if not p.marker or any(p.marker.evaluate({"extra": extra}) for extra in extras)]
    installed = {p.name: versions[canonicalize_name(p.name)] for p in wanted if canonicalize_name(p.name) in versions}
    fixes = [
        f"pip install '{p.name}{p.specifier}'" + (f" (here: {installed[p.name]})" if p.name in installed else "")
        for p in wanted
        if p.name not in installed or not p.specifier.contains(installed[p.name], prereleases=True)
    ]
    shown = [f"{name} {installed[name]}" for name in SHOWN_PACKAGES if name in installed]
    found = f"{', '.join(shown)} and {len(installed) - len(shown)} more"
    return Check(name="packages", found=found, fix="; ".join(fixes))


def _disk(config: TrainConfig, processes: int) -> Check:
    """Room for the checkpoints to come, from the number of parameters; they replace those of a run that goes on."""
    place = existing_folder(config.output_dir)
    free, one = shutil.disk_usage(place).free, checkpoint_bytes(config, processes)
    kept = config.checkpoints_total_limit
    if kept is None:
        kept = math.ceil(config.max_train_steps / (config.checkpointing_steps or config.max_train_steps))
    runs = [] if config.resume_from_checkpoint is None else earlier_run_folders(config.output_dir)[:1]
    old = list_checkpoints(*runs)
    lack = one * (kept + SPARE_SAVES) - free - _bytes_of(file for saved in old for file in saved.folder.glob("*"))
    found = f"{bytes_in_words(free)} free at {place}; {kept} + {SPARE_SAVES} checkpoints of {bytes_in_words(one)}"
    others = "keep fewer (--checkpoints_total_limit), or choose another --output_dir"
    fix = f"make room for {bytes_in_words(lack)} more, {others}" if lack > 0 else ""
    return Check(name="disk", found=found, fix=fix)


def _bytes_of(files: Iterable[Path]) -> int:
    total = 0
    for file in files:
        with suppress(FileNotFoundError):  # another process has just deleted it
            total += file.stat().st_size
    return total


def _port(port: int | None) -> Iterator[Check]:
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            yield Check(name="port", found=f"{port} is free")
        except OSError as fault:
            fix = "another job uses it: stop that one, or set MASTER_PORT to a free port"
            yield Check(name="port", found=f"{port}: {fault.strerror}", fix=fix)


def _weights(config: TrainConfig) -> Iterator[Check]:
    """What the run starts from and learns from; `path_complaints` has looked into these files."""
    start = config.pretrained_model_path
    yield Check(name="weights", found=f"start from {start}" if start else f"fresh ({config.init})")
    if config.teacher_path is not None:
        yield Check(name="teacher", found=config.teacher_path)
    with suppress(UserError):  # no loss needs them, and the metric is left out
        yield Check(name="LPIPS", found=str(find_lpips_weights(config.lpips_weights)))


def _data(config: TrainConfig) -> Iterator[Check]:
    """The index if there is one, else a sample of the files, split as the run would split them."""
    if lacks_sample_clips(config):
        yield Check(name="data", found=f"the sample clips will be written to {config.data_root}")
        return
    source = list_of_videos(config)
    try:
        if is_index(source):
            yield _split(config, open_index(source, config.data_root), f"index of {source}", whole=True)
        else:
            yield _sampled_data(config, source)
    except UserError as mistake:
        yield Check(name="data", found=str(source), fix=str(mistake))


def _file_cache(config: TrainConfig) -> Iterator[Check]:
    """Where files behind URLs are kept, if there are some."""
    if not any(isinstance(getattr(config, key), Url) for key in DATA_KEYS):
        return
    cache = file_cache()
    free = shutil.disk_usage(existing_folder(cache.folder)).free
    found = f"{cache.folder} for files of URLs, at most {cache.max_gb:g} GiB; {bytes_in_words(free)} free"
    too_small = _bytes_of(cache.folder.glob("*")) + free < cache.max_gb * GIB
    fix = "lower --file_cache_gb, or name a --file_cache_dir on a larger disk" if too_small else ""
    yield Check(name="file cache", found=found, fix=fix, only_warns=True)


def _latents(config: TrainConfig) -> Check | None:
    """Whether the latent store is complete and fits; its files are compared where the run has an index already."""
    if config.latent_store is None:
        return None
    try:
        index = config.index_path
        train = None if index is None else split_files(config, open_index(index, config.data_root))[0]
        store = open_latents(config, train, processes=None)
    except UserError as mistake:
        return Check(name="latents", found=str(config.latent_store), fix=str(mistake))
    assert store is not None
    num_clips = sum(map(len, store.stages))
    found = f"{count_of(num_clips, 'clip')} in {store.folder}, {bytes_in_words(store.num_bytes)}, complete"
    clips = config.train_batch_size * config.gradient_accumulation_steps
    found += f"; the first comes again after {count_of(store.num_clips // clips, 'step')} of one device"
    return Check(name="latents", found=found + ("" if train else "; the run compares its files at the start"))


def _sampled_data(config: TrainConfig, source: Place) -> Check:
    """Index a few files of the source in a temporary folder: a whole index can take hours."""
    root = config.data_root or default_data_root(source)
    entries = list(islice(iterate_entries(source, config.data_root), LISTED_FILES))
    chosen = sorted(entries, key=lambda entry: hash_of_path(entry.path))[:SAMPLED_FILES]
    whole = len(chosen) == len(entries)
    count = count_of(len(entries), "file") if len(entries) < LISTED_FILES else f"{LISTED_FILES} files or more"
    note = f"{count} in {source}" + ("" if whole else f", {len(chosen)} of them looked at")
    with tempfile.TemporaryDirectory() as folder:
        listing, output = Path(folder, "sample.jsonl"), Path(folder, "sample.tvi")
        listing.write_text("".join(json.dumps({"path": e.path, "split": e.split}) + "\n" for e in chosen))
        index = build_index(
            listing,
            output,
            data_root=root,
            num_workers=max(1, loading_processes(config)),
            timeout_s=config.decode_timeout_s,
            show_progress_bar=False,
        ).index
        index.source = str(source)  # messages name the source, not our list
        return _split(config, index, note, whole=whole)


def _split(config: TrainConfig, index: VideoIndex, note: str, *, whole: bool) -> Check:
    """``whole``: the index holds all files."""
    train, validation = split_files(config, index, whole=whole)
    note += f": {len(train)} train, {len(validation)} validate" if whole else f": {len(train)} of {len(index)} usable"
    if train.excluded.total:
        note += f"; left out: {train.excluded.sentence()}"
    fix = lack_of_files(config, train) or (lack_of_validation(config, validation) if whole else "")
    return Check(name="data", found=note, fix=fix)


class TrialStep(NamedTuple):
    """``seconds``: of one optimizer step on one device."""

    measured_at: str
    memory_bytes: int
    available_bytes: int
    seconds: float


def _without(config: TrainConfig, missing_keys: set[str]) -> TrainConfig:
    """The same run without what is missing, so that a step can be tried before everything is there."""
    if "pretrained_model_path" in missing_keys:
        config = replace(config, pretrained_model_path=None)
    if missing_keys & {"ref_vae_path", "latent_store"}:
        config = _with_round_trip(config, **NO_TEACHER)
    if "lpips_weights" in missing_keys:
        no_lpips = {"perceptual_loss_weight": 0.0, "lpips_weights": None, "metric_for_best_model": "psnr"}
        config = _with_round_trip(config, **no_lpips)
    return config


def _with_round_trip(config: TrainConfig, **changes: Any) -> TrainConfig:
    """The run without some of its losses. It trains its own round trip, because no other loss may be left."""
    return replace(config, **changes, reconstruction_loss_weight=config.reconstruction_loss_weight or 1.0)


def _trial_step(config: TrainConfig) -> Iterator[Check]:
    try:
        trial = try_step(config)
    except UserError as mistake:
        yield Check(name="one step", found="it cannot be taken", fix=str(mistake))
        return
    memory = f"{bytes_in_words(trial.memory_bytes)} of {bytes_in_words(trial.available_bytes)}"
    full = trial.memory_bytes > FULL_MEMORY * trial.available_bytes
    yield Check(name="memory", found=f"{memory} ({trial.measured_at})", fix=SAVE_MEMORY if full else "")
    total_s = trial.seconds * config.max_train_steps
    duration = f"{'at most ' if len(config.sizes.sizes) > 1 else ''}about {duration_in_words(total_s)}"
    found = f"{duration_in_words(trial.seconds)}, so {duration} for {config.max_train_steps:,} steps on one device"
    slow = f"no GPU is visible, and on this CPU the run would take {duration}: run it on a machine with a GPU"
    fits = torch.cuda.is_available() or total_s <= SLOW_RUN_S
    yield Check(name="one step", found=found, fix="" if fits else slow)


def try_step(config: TrainConfig) -> TrialStep:
    """Take a step of the largest clips on this machine's first device; `UserError` if it cannot be taken."""
    on_gpu = torch.cuda.is_available()
    tried = config if on_gpu else _small(config)
    pixels, tried_pixels = (c.train_batch_size * c.height * c.width for c in (config, tried))
    scale = pixels / tried_pixels
    clips = count_of(tried.train_batch_size, "clip")
    place = "measured" if on_gpu else "on the CPU" + (", scaled by pixels" if scale > 1 else "")
    place += ", the largest of the sizes" if len(config.sizes.sizes) > 1 else ""
    left_out = (config.teacher_path or config.latent_store) and not (tried.teacher_path or tried.latent_store)
    place += ", without the teacher" if left_out else ""
    free, total = torch.cuda.mem_get_info(0) if on_gpu else (0, 0)
    try:
        micro_batch_s, optimizer_s, kept, reserved = measure_step(tried, torch.device("cuda:0" if on_gpu else "cpu"))
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault):
            raise
        raise UserError(f"out of memory: {SAVE_MEMORY}") from None
    weights, discriminator = state_bytes(config)
    fixed = 5 * weights + 4 * discriminator  # weights, gradients, two moments, the average (not of Seraena)
    return TrialStep(
        measured_at=f"{clips} of {tried.n_frames} frames of {tried.height}x{tried.width} {place}",
        memory_bytes=reserved + total - free if on_gpu else int(fixed + kept * scale),
        available_bytes=total if on_gpu else psutil.virtual_memory().available,
        seconds=micro_batch_s * scale * config.gradient_accumulation_steps + optimizer_s,
    )


def _small(config: TrainConfig) -> TrainConfig:
    """The same run with small clips and no teacher, whose pass on a CPU would take minutes."""
    side = max(SMALL_SIDE // config.spec.space_factor, 2) * config.spec.space_factor
    return _with_round_trip(
        config,
        resolutions=(),
        height=min(config.height, side),
        width=min(config.width, side),
        train_batch_size=min(config.train_batch_size, SMALL_BATCH),
        compile_model=False,
        **NO_TEACHER,
    )


def _some_latents(config: TrainConfig, store: LatentStore) -> StoredLatents:
    """Values of the shape and type of a micro-batch of stored latents, for clips of the largest size."""
    spec, factor = config.spec, config.spec.space_factor
    shape = (spec.latents(config.n_frames), spec.latent_channels, config.height // factor, config.width // factor)
    values = torch.rand(config.train_batch_size, *shape).to(DTYPES[store.facts.dtype])
    return StoredLatents(mean=values, std=values if config.ref_vae_sample else None)


def measure_step(config: TrainConfig, device: torch.device) -> tuple[float, float, int, int]:
    """Seconds of a micro-batch (forward and backward) and of the optimizer, bytes that autograd keeps of a micro-batch,
    bytes that torch reserved on a GPU. The first of two steps warms up and counts bytes, the second takes the time."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    engine = Engine(config)
    model = build_model(config).to(device)
    engine.prepare(model, make_optimizers(model, config))
    store = None if config.latent_store is None else LatentStore.open(config.latent_store)
    task = build_task(config, engine, model, latents=store)
    positions = range(config.train_batch_size)
    stored = None if store is None else _some_latents(config, store).to(device)
    frames = torch.rand(config.train_batch_size, config.n_frames, 3, config.height, config.width, device=device)
    optimize = partial(engine.finish_step, max_grad_norm=config.max_grad_norm)
    kept: dict[int, int] = {}  # bytes by address: autograd keeps some storages several times

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    def micro_batch(watch: AbstractContextManager[object] = nullcontext()) -> None:  # noqa: B008 (it holds nothing)
        with engine.autocast(), watch:  # the forward pass alone: what checkpointing makes again is not kept
            losses = task.losses(frames, use_seraena=config.use_seraena, stored=stored, positions=positions)
        engine.backward(losses.total)

    def seconds_of(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    micro_batch(torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor))
    optimize()
    seconds = seconds_of(micro_batch), seconds_of(optimize)
    return *seconds, sum(kept.values()), torch.cuda.max_memory_reserved(device) if on_gpu else 0

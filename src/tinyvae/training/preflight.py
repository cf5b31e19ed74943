"""Everything that can be known before a long run starts, tried out: one line each, with a tick or the fix.

`preflight` is what ``tinyvae check`` shows; `checks_at_start` is the quick part of it that every run makes.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from tinyvae.config.rules import Complaint, GivenPath, path_complaints, value_complaints
from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.terminal import bytes_in_words, count_of, duration_in_words
from tinyvae.training.clips import loading_processes, usable_cores
from tinyvae.training.deepspeed import LaunchConfig
from tinyvae.training.trial_step import TrialStep, state_bytes, try_step

GIB = 2**30
OLDEST_DRIVER = (525, 60, 13)
SAMPLED_FILES = 24
LISTED_FILES = 100_000
SPARE_SAVES = 3  # beside the kept ones: the one being written, the best, and the last emergency one
FULL_MEMORY = 0.95
PIXELS_FOR_A_GPU = 10_000_000
"""Pixels of all frames of a step, at full model width, above which a step takes a CPU many minutes."""
SLOW_RUN_S = 3 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """``found``: what is there. ``fix``: what to do about it, empty where it is well. ``only_warns``: it may start."""

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
    """All checks. ``processes``: on this machine; ``port``: where several processes meet (None: nobody does)."""
    checks = [*_settings(config, launch), *_gpus(config, processes), *_packages(config, launch)]
    missing = path_complaints(config, given_paths)
    checks += [Check(name="files", found="not as the settings say", fix=complaint.text) for complaint in missing]
    if not missing:
        checks.append(Check(name="files", found="all that the settings name are there"))
        checks += _weights(config)
    missing_keys = {key for complaint in missing for key in complaint.keys}
    if not missing_keys & {"data_root", "annotation_file", "index_path"}:
        checks += _data(config)
    checks += [_disk(config, processes), *_port(port)]
    if with_step and all(check.passes for check in checks if check.name == "settings"):
        checks += _trial_step(without(config, missing_keys))
    return checks


def without(config: TrainConfig, missing_keys: set[str]) -> TrainConfig:
    """The same run without what is missing, so that a step can be tried before everything is there."""
    changes: dict[str, Any] = {}
    if "pretrained_model_path" in missing_keys:
        changes |= {"pretrained_model_path": None}
    if missing_keys & {"ref_vae_path", "cogvideox_model_path"}:
        changes |= {"use_ref_vae": False, "encoder_loss_weight": 0.0, "decoder_loss_weight": 0.0}
    if "lpips_weights" in missing_keys:
        changes |= {"perceptual_loss_weight": 0.0, "lpips_weights": None, "metric_for_best_model": "psnr"}
    return replace(config, **changes)


def checks_at_start(config: TrainConfig, *, processes: int) -> list[Check]:
    """What takes no time: GPUs, driver, precision, disk. A run makes them on its main process."""
    return [*_gpus(config, processes), _disk(config, processes)]


def machine_complaints(config: TrainConfig) -> list[Complaint]:
    """A run that this machine would take years for: a step made for GPUs, where there is none."""
    clips = config.train_batch_size * config.gradient_accumulation_steps
    pixels = clips * config.n_frames * config.height * config.width * config.model_width**2
    if torch.cuda.is_available() or config.allow_cpu or pixels <= PIXELS_FOR_A_GPU:
        return []
    text = (
        f"no GPU is visible here, and one step of this run is {count_of(clips, 'clip')} of {config.n_frames} frames of "
        f"{config.height}x{config.width}, which takes a CPU many minutes; run it on a machine with a GPU, try it small "
        "with --height 64 --width 64 --train_batch_size 1 --gradient_accumulation_steps 1 --mixed_precision no "
        "--max_train_steps 4, or pass --allow_cpu true to train here all the same."
    )
    return [Complaint(keys=("allow_cpu",), text=text)]


def print_table(checks: Iterable[Check], stream: TextIO | None = None) -> None:
    """One line for each check; the fix stands below what it is for."""
    rows, stream = list(checks), stream or sys.stdout
    try:
        "✓✗".encode(stream.encoding or "ascii")
        marks = {"well": "✓", "warns": "!", "fails": "✗"}
    except UnicodeEncodeError:
        marks = {"well": "ok", "warns": "!!", "fails": "NO"}
    width = max(len(check.name) for check in rows)
    for check in rows:
        mark = marks["well" if not check.fix else "warns" if check.only_warns else "fails"]
        print(f" {mark:<2} {check.name:<{width}}  {check.found}", file=stream)
        if check.fix:
            print(f"    {'':<{width}}  fix: {check.fix}", file=stream)


# the settings


def _settings(config: TrainConfig, launch: LaunchConfig | None) -> Iterator[Check]:
    complaints = value_complaints(config)
    for complaint in complaints:
        yield Check(name="settings", found="a rule is broken", fix=complaint.text)
    if not complaints:
        spec = config.spec
        latents, back = spec.latents(config.n_frames), spec.frames_out(config.n_frames)
        frames = f"{count_of(config.n_frames, 'frame')} -> {count_of(latents, 'latent')} -> {count_of(back, 'frame')}"
        frames += f" of {config.height}x{config.width}"
        if config.use_seraena:
            groups = spec.padded_frames(config.n_frames) // config.n_seraena_frames
            frames += f"; Seraena sees {count_of(groups, 'group')} of {config.n_seraena_frames}"
        yield Check(name="frames", found=f"{config.variant}: {frames}")
    if launch is not None:
        engine = "DDP" if launch.deepspeed is None else f"DeepSpeed ZeRO-{launch.deepspeed.zero_optimization.stage}"
        clashes = "; ".join(launch.disagreements(config))
        if launch.deepspeed is not None and config.optimizer == "muon":
            clashes = "; ".join(filter(None, [clashes, "DeepSpeed cannot run optimizer=muon: use --optimizer adamw"]))
        yield Check(name="launch", found=f"{engine}, {launch.place}", fix=clashes)


# the machine


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
    kinds = sorted({f"{p.name}, {p.total_memory / GIB:.0f} GiB" for p in properties})
    lacking = f"{processes} are wanted: ask for at most {count}, or look at CUDA_VISIBLE_DEVICES"
    yield Check(name="GPUs", found=f"{count} x {' / '.join(kinds)}", fix=lacking if count < processes else "")
    driver = driver_version()
    old = driver is not None and driver < OLDEST_DRIVER
    shown = "unknown" if driver is None else ".".join(map(str, driver))
    yield Check(
        name="driver",
        found=f"{shown}; torch {torch.__version__} for CUDA {torch.version.cuda}",
        fix=f"install a driver of at least {'.'.join(map(str, OLDEST_DRIVER))}" if old else "",
        only_warns=True,
    )
    if config.mixed_precision == "bf16":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        fix = "" if fast else "this GPU has no bf16: use --mixed_precision fp16 or no"
        yield Check(name="bf16", found="the GPU computes in it" if fast else "not on this GPU", fix=fix)


def driver_version() -> tuple[int, ...] | None:
    """The NVIDIA driver's version from the kernel module; None where it cannot be told."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    return parse_driver_version(text)


def parse_driver_version(text: str) -> tuple[int, ...] | None:
    """``... Kernel Module  525.60.13  ...`` -> (525, 60, 13)."""
    for word in text.split():
        parts = word.split(".")
        if len(parts) >= 2 and all(part.isdigit() for part in parts) and len(parts[0]) == 3:
            return tuple(int(part) for part in parts)
    return None


def _packages(config: TrainConfig, launch: LaunchConfig | None) -> Iterator[Check]:
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    extras = ["deepspeed"] if launch is not None and launch.deepspeed is not None else []
    extras += ["teachers"] if config.teacher_path is not None else []
    shown: dict[str, str] = {}
    problems: dict[str, str] = {}
    try:
        lines = requires("tinyvae") or []
    except PackageNotFoundError:  # run from the source folder: nobody has written down what it needs
        yield Check(
            name="packages", found="tinyvae is not installed, only on the path", fix="pip install -e .", only_warns=True
        )
        return
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            problems[requirement.name] = f"pip install '{requirement.name}{requirement.specifier}'"
            continue
        shown[requirement.name] = f"{requirement.name} {installed}"
        if not requirement.specifier.contains(installed, prereleases=True):
            problems[requirement.name] = f"pip install '{requirement.name}{requirement.specifier}' (here: {installed})"
    first = [shown[name] for name in ("torch", "accelerate", "deepspeed", "diffusers", "av") if name in shown]
    rest = len(shown) - len(first)
    yield Check(name="packages", found=f"{', '.join(first)} and {rest} more", fix="; ".join(problems.values()))


def _disk(config: TrainConfig, processes: int) -> Check:
    """Room for the checkpoints to come, by arithmetic from the number of parameters."""
    place = next(parent for parent in (config.output_dir, *config.output_dir.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    one = checkpoint_bytes(config, processes)
    kept = config.checkpoints_total_limit
    if kept is None:
        every = config.checkpointing_steps or config.max_train_steps
        kept = -(-config.max_train_steps // every)
    wanted = one * (kept + SPARE_SAVES)
    found = f"{bytes_in_words(free)} free at {place}; {kept} + {SPARE_SAVES} checkpoints of {bytes_in_words(one)}"
    lack = bytes_in_words(wanted - free)
    fix = f"make room for {lack} more, keep fewer (--checkpoints_total_limit), or choose another --output_dir"
    if not os.access(place, os.W_OK):
        return Check(name="disk", found=f"{place} cannot be written to", fix="choose another --output_dir")
    return Check(name="disk", found=found, fix=fix if wanted > free else "")


def checkpoint_bytes(config: TrainConfig, processes: int) -> int:
    """Bytes of one checkpoint at most: weights, moments, average, the model to use, Seraena with its buffers."""
    state = state_bytes(config)
    total = state.weights * (2 + 2 + (1 if config.ema_decay > 0 else 0))  # both models, both moments, the average
    if config.use_seraena:
        total += 3 * state.discriminator + processes * config.seraena_buffer_mb * 2**20
    return total


def _port(port: int | None) -> Iterator[Check]:
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as fault:
            fix = "another job uses it: stop that one, or set MASTER_PORT to a free port"
            yield Check(name="port", found=f"{port}: {fault.strerror}", fix=fix)
            return
    yield Check(name="port", found=f"{port} is free")


# weights, teacher, data


def _weights(config: TrainConfig) -> Iterator[Check]:
    from tinyvae.losses.perceptual import find_lpips_weights
    from tinyvae.teachers import check_teacher

    start = config.pretrained_model_path
    yield Check(name="weights", found=f"start from {start}" if start else f"fresh ({config.init})")
    if config.teacher_path is not None:
        try:
            check_teacher(config.teacher_path, config.ref_vae_type, config.spec)
            yield Check(name="teacher", found=config.teacher_path)
        except UserError as mistake:
            yield Check(name="teacher", found=config.teacher_path, fix=str(mistake))
    try:
        yield Check(name="LPIPS", found=str(find_lpips_weights(config.lpips_weights)))
    except UserError as mistake:
        if config.perceptual_loss_weight > 0:  # without a loss on it the metric is just left out
            yield Check(name="LPIPS", found="no weights", fix=str(mistake))


def _data(config: TrainConfig) -> Iterator[Check]:
    """The index where there is one, else a sample of the files, split as the run would split them."""
    from tinyvae.data.index import is_index, open_index

    source = config.data_source
    assert source is not None, "path_complaints lets no run without data through"
    if config.use_sample_clips and (not source.is_dir() or not any(source.iterdir())):
        yield Check(name="data", found=f"the sample clips will be written to {source}")
        return
    try:
        if source.is_file() and is_index(source):
            yield _split_check(config, open_index(source, config.data_root), f"index of {source}", whole=True)
        else:
            yield _sampled_data(config, source)
    except UserError as mistake:
        yield Check(name="data", found=str(source), fix=str(mistake))


def _sampled_data(config: TrainConfig, source: Path) -> Check:
    """Index a few files of the source in a temporary folder: a whole index can take hours."""
    import json
    from itertools import islice

    from tinyvae.data.annotations import default_data_root, iterate_entries
    from tinyvae.data.index import hash_of_path, open_index
    from tinyvae.data.index_build import build_index

    root = config.data_root or default_data_root(source)
    entries = list(islice(iterate_entries(source, config.data_root), LISTED_FILES))
    if not entries:
        raise UserError(f"there is no video in {source}; is it the right folder?")
    chosen = sorted(entries, key=lambda entry: hash_of_path(entry.path))[:SAMPLED_FILES]
    count = f"{len(entries)} files" if len(entries) < LISTED_FILES else f"{LISTED_FILES} files or more"
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "sample.jsonl"
        listing.write_text("".join(json.dumps({"path": e.path, "split": e.split}) + "\n" for e in chosen))
        output = Path(folder) / "sample.tvi"
        build_index(
            listing,
            output,
            data_root=root,
            num_workers=max(1, loading_processes(config)),
            timeout_s=config.decode_timeout_s,
            show_progress_bar=False,
        )
        whole = len(chosen) == len(entries)
        note = f"{count} in {source}" + ("" if whole else f", {len(chosen)} of them looked at")
        try:
            return _split_check(config, open_index(output, root), note, whole=whole)
        except UserError as mistake:  # which names what the index was made of: here the list of the sample
            raise UserError(str(mistake).replace(str(listing), str(source))) from None


def _split_check(config: TrainConfig, index: object, note: str, *, whole: bool) -> Check:
    from tinyvae.data.index import VideoIndex
    from tinyvae.data.splits import split
    from tinyvae.training.clips import training_settings

    assert isinstance(index, VideoIndex)
    # The hash can put a whole sample on one side; it is the files that count there, not the sides.
    share = config.train_split if whole else 1.0
    by = config.split_by if whole else "hash"
    train, validation = split(
        index, training_settings(config), train_split=share, split_by=by, bad_file_limit=config.bad_file_limit
    )
    usable = len(train) + len(validation)
    sides = f": {len(train)} train, {len(validation)} validate" if whole else f": {usable} of {len(index)} usable"
    left_out = f"; left out: {train.excluded.sentence()}" if train.excluded.total else ""
    if train.excluded.is_most_of(len(index)):
        fix = (
            f"most files cannot be used: smaller or shorter clips than {config.n_frames} frames of {config.height}x"
            f"{config.width}, --allow_upscale true, or other files"
        )
        return Check(name="data", found=note + sides + left_out, fix=fix)
    if whole and config.validation_steps > 0 and len(validation) == 0:
        return Check(name="data", found=note + sides, fix="add files, lower --train_split, or --validation_steps 0")
    return Check(name="data", found=note + sides + left_out)


# one step


def _trial_step(config: TrainConfig) -> Iterator[Check]:
    trial: TrialStep = try_step(config)
    if trial.fault:
        yield Check(name="one step", found=trial.measured_at, fix=trial.fault)
        return
    memory = f"{bytes_in_words(trial.memory_bytes)} of {bytes_in_words(trial.available_bytes)}"
    full = trial.memory_bytes > FULL_MEMORY * trial.available_bytes
    fix = "use --gradient_checkpointing true, a smaller --train_batch_size, fewer frames or smaller ones"
    yield Check(name="memory", found=f"{memory} ({trial.measured_at})", fix=fix if full else "")
    total_s = trial.seconds * config.max_train_steps
    duration = duration_in_words(total_s)
    slow = f"no GPU is visible, and on this CPU the run would take about {duration}: run it on a machine with a GPU"
    steps = f"{config.max_train_steps:,} steps"
    yield Check(
        name="one step",
        found=f"{duration_in_words(trial.seconds)}, so about {duration} for {steps} on one device",
        fix=slow if not torch.cuda.is_available() and total_s > SLOW_RUN_S else "",
    )

"""Weight files: which formats are read and written, and how a file says which variant it is.

Read: ``.safetensors``, ``.pth`` (tensors only), a model or checkpoint folder, a run folder. Written:
``model.safetensors``, ``model.pth`` and ``config.json``. What a file *is* is told by its content, never by its name:
renaming a file must not change the model. The variant comes from, in this order: the ``variant`` argument,
safetensors metadata, ``config.json`` beside the file, and last the keys and shapes themselves.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyvae.errors import FileExistsAlreadyError, MissingFileError, UserError
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VARIANTS, WIDTH_STEP, Preview, VariantSpec, get_spec
from tinyvae.version import __version__

MODEL_FORMAT = "tinyvae-model"
RUN_FORMAT = "tinyvae-run"
LATENT_CONVENTION = "diffusion space: as the diffusion model sees latents, after its VAE's scaling factor or mean/std"
WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile
SHOWN_KEYS = 4


def load_model(
    path: str | os.PathLike[str],
    variant: str | None = None,
    *,
    preview: Preview | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> TAEHV:
    """The model in a weights file, model folder, checkpoint folder or run folder, in eval mode.

    A run folder gives its best model, else its final one, else its newest checkpoint. ``variant`` overrules what the
    file states; it is needed only where neither the file nor its shapes can tell. ``dtype`` defaults to the file's.
    """
    weights_file = find_weights(Path(path))
    state, stated = read_weights(weights_file)
    spec = tell_variant(state, stated=stated, variant=variant, origin=weights_file)
    with torch.device("meta"):
        model = TAEHV(spec.name, width=spec.width, preview=preview)
    check_state(state, model, origin=weights_file)
    model.load_state_dict(state, assign=True)
    file_dtype = state["encoder.0.weight"].dtype
    return model.to(device=torch.device(device), dtype=dtype or file_dtype).eval().requires_grad_(True)


def save_model(
    model: TAEHV,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    training_step: int | None = None,
) -> list[Path]:
    """Write a model and its ``config.json``; returns the files written.

    A path that ends in ``.safetensors`` or ``.pth`` is one file; any other path is a folder that gets
    ``model.safetensors`` and ``model.pth``. Existing files are refused unless ``overwrite``. Each file appears whole
    or not at all.
    """
    target = Path(path)
    single = target.suffix in (".safetensors", ".pth")
    folder = target.parent if single else target
    weights_files = [target] if single else [folder / "model.safetensors", folder / "model.pth"]
    config_file = folder / "config.json"
    state = plain_state(model, dtype=dtype)
    config = describe(model.spec, training_step=training_step)
    if not overwrite:
        _refuse_existing(weights_files, config_file, config)
    folder.mkdir(parents=True, exist_ok=True)
    for file in weights_files:
        with _appears_whole(file) as temporary:
            _write_state(state, temporary, suffix=file.suffix, config=config)
    if not _holds_run_config(config_file):  # a run folder's config.json already states variant and width
        with _appears_whole(config_file) as temporary:
            temporary.write_text(json.dumps(config, indent=1) + "\n")
    return [*weights_files, config_file]


def describe(spec: VariantSpec, *, training_step: int | None = None) -> dict[str, Any]:
    """The content of ``config.json``: everything another program needs to build and use the network."""
    facts = asdict(spec)
    facts.pop("preview")  # a way of running the weights, not a property of them
    facts["variant"] = facts.pop("name")
    return {
        "format": MODEL_FORMAT,
        **facts,
        "encoder_channels": [spec.hidden(64)],
        "decoder_channels": [
            spec.hidden(c) for c in ((512, 256, 128, 64) if spec.decoder == "super" else (256, 128, 64))
        ],
        "time_factor": spec.time_factor,
        "space_factor": spec.space_factor,
        "trim": spec.trim,
        "latent_convention": LATENT_CONVENTION,
        "tinyvae_version": __version__,
        "training_step": training_step,
    }


def plain_state(model: torch.nn.Module, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The state dict with the family's flat keys: wrappers stripped, contiguous, on the CPU."""
    return {
        strip_wrappers(key): value.detach().to("cpu", dtype or value.dtype).contiguous()
        for key, value in model.state_dict().items()
    }


def strip_wrappers(key: str) -> str:
    while key.startswith(WRAPPERS):
        key = key.split(".", 1)[1]
    return key


# finding and reading


def find_weights(path: Path) -> Path:
    """The weights file that a path means: itself, or the best one inside a folder."""
    if path.is_file():
        return path
    if not path.exists():
        raise MissingFileError(f"there is no model at {path} (looked from {Path.cwd()}); check the path.")
    checkpoints = sorted(path.glob("*checkpoint-*"), key=_step_of, reverse=True)
    for folder in (path, path / "best_model"):
        for name in ("model.safetensors", "model.pth"):
            if (folder / name).is_file():
                return folder / name
    for name in (
        "final_model.safetensors",
        "final_model.pth",
        *(f"{c.name}/model.safetensors" for c in checkpoints),
    ):
        if (path / name).is_file():
            return path / name
    loose = sorted(f for f in path.iterdir() if f.suffix in (".safetensors", ".pth"))
    if len(loose) == 1:
        return loose[0]
    found = f"it holds {len(loose)} weight files; name one of them" if loose else "it holds no weights"
    raise UserError(f"{path} is not a model, checkpoint or run folder: {found}.")


def _step_of(checkpoint: Path) -> int:
    number = re.search(r"checkpoint-(\d+)$", checkpoint.name)
    return int(number.group(1)) if number else -1


def read_weights(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(state dict, what the file or its ``config.json`` states). The format is told by the first bytes."""
    with file.open("rb") as stream:
        head = stream.read(16)
    metadata: dict[str, Any] = {}
    if head[:2] in (b"PK", b"\x80\x02"):
        state = _read_pickled(file)
    elif head[8:9] == b"{":
        state, metadata = _read_safetensors(file)
    else:
        raise UserError(
            f"{file} is neither a safetensors nor a .pth file, or it is cut off; download or save it again."
        )
    state = {strip_wrappers(key): value for key, value in state.items()}
    return state, metadata or _read_config(file.parent / "config.json")


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            state = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
            text = (opened.metadata() or {}).get("tinyvae", "{}")
    except SafetensorError as fault:
        raise UserError(f"{file} is not a whole safetensors file ({fault}); download or save it again.") from None
    return state, _parse_stated(text, origin=file)


def _read_pickled(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{file} holds more than tensors (or is damaged) and could run code when opened, so it was not read; "
            "ask its author for a .safetensors file."
        ) from None
    except (RuntimeError, EOFError) as fault:
        reason = str(fault).splitlines()[0] if str(fault) else "unexpected end"
        raise UserError(f"{file} is not a whole .pth file ({reason}); download or save it again.") from None
    for wrapper in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{file} does not hold a state dict (a mapping of names to tensors); it is not a model file.")
    return {str(key): value for key, value in content.items()}


def _read_config(file: Path) -> dict[str, Any]:
    return _parse_stated(file.read_text(), origin=file) if file.is_file() else {}


def _parse_stated(text: str, *, origin: Path) -> dict[str, Any]:
    """``{"variant", "width"}`` as a config states them; a config of some other program states nothing."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as fault:
        raise UserError(f"{origin} holds a description that is not valid JSON ({fault}); mend or remove it.") from None
    if not isinstance(config, dict) or config.get("format") not in (MODEL_FORMAT, RUN_FORMAT):
        return {}
    width_key = "width" if config["format"] == MODEL_FORMAT else "model_width"  # a run's width is in pixels
    return {"variant": config.get("variant"), "width": config.get(width_key)}


# which variant


def tell_variant(
    state: Mapping[str, Tensor], *, stated: Mapping[str, Any], variant: str | None, origin: Path
) -> VariantSpec:
    """The variant and width of a state dict: as asked, as stated, or by its keys and shapes."""
    width = _width_of(state)
    if width is None:
        raise UserError(
            f"{origin} is no model of this family: {_first_keys(state)}; expected encoder.0.weight, decoder.22.weight."
        )
    fitting = [name for name in VARIANTS if _fits(state, name, width)]
    wanted = variant or stated.get("variant")
    if wanted is not None:
        spec = get_spec(wanted, width=width)
        if wanted not in fitting:
            likely = f"it looks like {' or '.join(fitting)}" if fitting else "it fits no variant"
            said = "was asked for" if variant else "is stated for it"
            raise UserError(f"{origin} is not a {wanted} model, which {said}; {likely}. {_difference(state, spec)}")
        return spec
    if not fitting:
        closest = max(VARIANTS, key=lambda name: _matching_keys(state, get_spec(name, width=width)))
        difference = _difference(state, get_spec(closest, width=width))
        raise UserError(f"{origin} fits no variant; the closest is {closest}. {difference}")
    if len(fitting) > 1:
        warnings.warn(
            f"{origin.name} could be {', '.join(fitting)}: they share one network and nothing states which; "
            f"taking {fitting[0]}. Pass variant= to say.",
            stacklevel=3,
        )
    return get_spec(fitting[0], width=width)


def _width_of(state: Mapping[str, Tensor]) -> float | None:
    first = state.get("encoder.0.weight")
    if first is None or first.ndim != 4 or "decoder.22.weight" not in state:
        return None
    width = first.shape[0] / 64
    return width if width % WIDTH_STEP == 0 and width > 0 else None


def _expected_shapes(spec: VariantSpec) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {key: value.shape for key, value in TAEHV(spec.name, width=spec.width).state_dict().items()}


def _fits(state: Mapping[str, Tensor], variant: str, width: float) -> bool:
    return {key: value.shape for key, value in state.items()} == _expected_shapes(get_spec(variant, width=width))


def _matching_keys(state: Mapping[str, Tensor], spec: VariantSpec) -> int:
    expected = _expected_shapes(spec)
    return sum(key in expected and expected[key] == value.shape for key, value in state.items())


def _difference(state: Mapping[str, Tensor], spec: VariantSpec) -> str:
    """The first few keys in which a state dict differs from a variant."""
    expected = _expected_shapes(spec)
    lines = [f"{key} is missing" for key in expected if key not in state]
    lines += [f"{key} is not known" for key in state if key not in expected]
    lines += [
        f"{key} is {list(state[key].shape)} instead of {list(shape)}"
        for key, shape in expected.items()
        if key in state and state[key].shape != shape
    ]
    more = f" and {len(lines) - SHOWN_KEYS} more" if len(lines) > SHOWN_KEYS else ""
    return f"Against {spec.name}: {'; '.join(lines[:SHOWN_KEYS])}{more}."


def _first_keys(state: Mapping[str, Tensor]) -> str:
    keys = list(state)[:SHOWN_KEYS]
    return f"it begins with {', '.join(keys)}" if keys else "it holds no tensor"


def check_state(state: Mapping[str, Tensor], model: TAEHV, *, origin: Path) -> None:
    """Refuse weights that are no numbers a network can use."""
    for key, value in state.items():
        if not value.is_floating_point():
            raise UserError(f"{origin}: {key} is {value.dtype}, not floating point; this is not a plain model file.")
    dtypes = {str(value.dtype).removeprefix("torch.") for value in state.values()}
    if len(dtypes) > 1:
        raise UserError(f"{origin} mixes the dtypes {', '.join(sorted(dtypes))}; save it in one.")
    assert set(state) == set(model.state_dict())


# writing


def _refuse_existing(weights_files: list[Path], config_file: Path, config: Mapping[str, Any]) -> None:
    for file in weights_files:
        if file.exists():
            raise FileExistsAlreadyError(f"{file} exists already; pass overwrite=True to replace it.")
    if config_file.exists() and not _holds_run_config(config_file):
        known = {"variant": config["variant"], "width": config["width"]}
        if _read_config(config_file) != known:
            raise FileExistsAlreadyError(
                f"{config_file} describes another model; save to another folder or pass overwrite=True."
            )


def _holds_run_config(config_file: Path) -> bool:
    if not config_file.is_file():
        return False
    try:
        config = json.loads(config_file.read_text())
    except json.JSONDecodeError:
        return False
    return isinstance(config, dict) and config.get("format") == RUN_FORMAT


def _write_state(state: dict[str, Tensor], file: Path, *, suffix: str, config: Mapping[str, Any]) -> None:
    if suffix == ".pth":
        torch.save(state, file)
        return
    from safetensors.torch import save

    # Not save_file: it makes files that only their owner can read, whatever the umask says.
    file.write_bytes(save(state, metadata={"format": "pt", "tinyvae": json.dumps(config)}))


@contextmanager
def _appears_whole(file: Path) -> Iterator[Path]:
    """A temporary path beside ``file`` that becomes it in one rename, after its bytes have reached the disk."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)

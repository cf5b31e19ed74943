"""Which variant a state dict is: as asked, as stated, or by its keys and shapes; and what a file's name can object to.

Four variants share one network, and so do the two for LTX. There shapes cannot tell, and where nothing states the
variant it is a guess. A name never chooses: names are changed. But a guess that the file's own name contradicts
(``taecvx.pth`` taken for taehv) is refused, because the wrong frame rule and the wrong latent space would go unseen.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VARIANTS, WIDTH_STEP, VariantSpec, get_spec

SHOWN_KEYS = 4


def tell_variant(
    state: Mapping[str, Tensor],
    *,
    stated: Mapping[str, Any],
    variant: str | None,
    origin: Path,
    presumed: str | None = None,
) -> VariantSpec:
    """The variant and width of a state dict.

    ``variant`` is what the caller says of these weights, and is obeyed. ``presumed`` is what holds where they say
    nothing themselves, such as the variant of a preset.
    """
    width = _width_of(state)
    if width is None:
        raise UserError(
            f"{origin} is no model of this family: {_first_keys(state)}; expected encoder.0.weight, decoder.22.weight."
        )
    if variant is None and stated.get("width") not in (None, width):
        raise UserError(
            f"{origin} has width {width:g} and is stated to have {stated['width']:g}: the description "
            "(config.json, or the file's metadata) is that of another model; remove it, or pass variant."
        )
    fitting = fitting_variants(state)
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
    taken = presumed if presumed in fitting else fitting[0]
    if len(fitting) > 1:
        _object_by_name(origin, taken, fitting)
        if taken != presumed:
            warnings.warn(
                f"{origin.name} could be {', '.join(fitting)}: they share one network and nothing states which; "
                f"taking {taken}. Say which with variant= (in a command: --variant).",
                stacklevel=3,
            )
    return get_spec(taken, width=width)


def fitting_variants(state: Mapping[str, Tensor]) -> list[str]:
    """The variants whose keys and shapes these are, in the order of the table."""
    width = _width_of(state)
    return [] if width is None else [name for name in VARIANTS if _fits(state, name, width)]


def variants_in_name(file: Path) -> list[str]:
    """The variants that a file's name speaks of: ``my-taew2.1.pth`` of taew2_1, not of taew2_2."""
    longest_first = sorted(VARIANTS, key=len, reverse=True)
    # A separator may be another one or left out, and a number must end: taehv10 is not taehv1 and a zero.
    patterns = {name: re.compile(name.replace("_", "[._-]?") + r"(?!\d)") for name in longest_first}
    left, found = file.name.lower(), []
    for name, pattern in patterns.items():
        left, count = pattern.subn(" ", left)  # so that taehv is not found inside taehv1_5
        found += [name] if count else []
    return found


def _object_by_name(origin: Path, taken: str, fitting: list[str]) -> None:
    named = variants_in_name(origin)
    if named and taken not in named:
        likely = next((name for name in named if name in fitting), "NAME")
        raise UserError(
            f"{origin} could be {', '.join(fitting)}: they share one network and nothing in the file states which. "
            f"It would be taken for {taken}, but its name speaks of {' and '.join(named)}; say which it is with "
            f"--variant {likely} (in Python: variant={likely!r})."
        )


def _width_of(state: Mapping[str, Tensor]) -> float | None:
    first = state.get("encoder.0.weight")
    if first is None or first.ndim != 4 or "decoder.22.weight" not in state:
        return None
    width = first.shape[0] / 64
    return width if width % WIDTH_STEP == 0 and width > 0 else None


@cache
def _expected_shapes(spec: VariantSpec) -> Mapping[str, torch.Size]:
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

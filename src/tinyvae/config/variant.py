"""Which variant a run trains where no setting names it: its teacher tells it, else the weights that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyvae.errors import UserError
from tinyvae.models.variants import VARIANTS

TEACHER_KEYS = ("latent_store", "ref_vae_path", "ref_vae_type")
"""The settings that tell who the teacher is."""


@dataclass(frozen=True, kw_only=True)
class ToldVariant:
    """A variant, and the reason for it as the end of a sentence."""

    name: str
    because: str


@dataclass(frozen=True, kw_only=True)
class Taught:
    """What a teacher is, in words, and the variants that can learn from it."""

    teacher: str
    students: tuple[str, ...]


def variant_of_teacher(settings: Mapping[str, Any]) -> ToldVariant | None:
    """The variant that the run's teacher or latent store tells; None where a run has none, or it is not here.

    ``settings``: key -> value of those that are set. ``UserError`` where no variant, or more than one, fits.

    Example: ``variant_of_teacher({"use_ref_vae": True, "ref_vae_path": "CogVideoX-2b"}).name`` is "taecvx".
    """
    if all(settings.get(key) is None for key in TEACHER_KEYS):
        return None  # at once: what follows loads torch
    taught = _by_store(settings) or _by_teacher(settings) or _by_kind(settings)
    if taught is None:
        return None
    students = taught.students
    if len(students) > 1 and (weights := settings.get("pretrained_model_path")) is not None:
        students = _with_these_weights(students, weights)
    if not students:
        raise UserError(f"there is no variant for {taught.teacher}; name another teacher (docs/teachers.md).")
    if len(students) > 1:
        choices = " or ".join(f"--variant {name}" for name in students)
        raise UserError(f"several variants can learn from {taught.teacher}; say which: {choices}.")
    return ToldVariant(name=students[0], because=f"it is the one for {taught.teacher}; set variant to say otherwise")


def _by_store(settings: Mapping[str, Any]) -> Taught | None:
    """By the class of the teacher that made the latent store, and its channels."""
    from tinyvae.data.latent_store import LatentStore
    from tinyvae.teachers.families import FAMILIES

    store = settings.get("latent_store")
    try:
        facts = None if store is None else LatentStore.open(store).facts
    except UserError:
        return None  # the check of the run's files says what is wrong
    if facts is None or facts.teacher["class"] not in FAMILIES:
        return None
    family, channels = FAMILIES[facts.teacher["class"]], len(facts.space["mean"])
    students = tuple(name for name in family.variants if VARIANTS[name].latent_channels == channels)
    what = f"the teacher of the latents in {store} ({family.class_name}, {channels} latent channels)"
    return Taught(teacher=what, students=students)


def _by_teacher(settings: Mapping[str, Any]) -> Taught | None:
    """By the teacher's config.json; a network of ours teaches its own variant first."""
    path = settings.get("ref_vae_path")
    if path is None or not settings.get("use_ref_vae") or settings.get("latent_store") is not None:
        return None
    from tinyvae.teachers import find_teacher
    from tinyvae.teachers.families import NETWORK

    try:
        found = find_teacher(path, settings.get("ref_vae_type"))
    except UserError:
        return None  # the check of the run's files says what is wrong
    what = f"the teacher {path} ({found.family.class_name}: {found.geometry})"
    own = found.config["variant"] if found.family.kind == NETWORK.kind else None
    return Taught(teacher=what, students=(own,) if own else found.family.variant_candidates(found.geometry))


def _by_kind(settings: Mapping[str, Any]) -> Taught | None:
    """By the teacher's kind alone, where only one variant learns from that kind: the teacher may be elsewhere."""
    from tinyvae.teachers.families import FAMILIES

    kind = settings.get("ref_vae_type")
    students = tuple(name for family in FAMILIES.values() if family.kind == kind for name in family.variants)
    return Taught(teacher=f"a {kind} teacher", students=students) if len(students) == 1 else None


def _with_these_weights(students: tuple[str, ...], weights: Path) -> tuple[str, ...]:
    """Those of the variants whose network the weights are; all where the weights cannot be read here."""
    from tinyvae.models.weights import find_weights, fitting_variants, read_weights

    try:
        state, stated = read_weights(find_weights(weights))
    except UserError:
        return students  # the check of the run's files says what is wrong
    fitting = [stated["variant"]] if stated.get("variant") else fitting_variants(state)
    return tuple(name for name in students if name in fitting) or students


def variant_of_weights(weights: Path, presumed: str | None, presumed_by: str) -> ToldVariant | None:
    """The variant of the weights to start from; None where ``presumed``, which ``presumed_by`` sets, is right."""
    from tinyvae.models.weights import find_weights, fitting_variants, read_weights, tell_variant

    file = find_weights(weights)
    state, stated = read_weights(file)
    found = tell_variant(state, stated=stated, variant=None, origin=file, presumed=presumed).name
    if presumed is None:
        because, fitting = f"the weights in {file} are of that network", fitting_variants(state)
        if not stated.get("variant") and len(fitting) > 1:
            because = f"nothing tells which of {', '.join(fitting)} the weights in {file} are"
        return ToldVariant(name=found, because=f"{because}; set variant to say otherwise")
    if found != presumed:
        text = f"the weights in {file} are {found}, and {presumed_by} sets variant to {presumed}; "
        raise UserError(f"{text}say which to train with --variant.")
    return None

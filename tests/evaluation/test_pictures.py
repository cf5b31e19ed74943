"""Heat maps, patches and latent pictures of known content."""

from __future__ import annotations

import base64
import io

import torch
from PIL import Image

from tinyvae.convert.reconstruct import (
    GAP_LEVEL,
    GAP_PIXELS,
    panel_labels,
    side_by_side,
    side_by_side_width,
    with_labels,
)
from tinyvae.evaluation.pictures import (
    HEAT_FULL_SCALE,
    HEAT_STOPS,
    heat_map,
    jpeg_uri,
    latents_as_colour,
    png_uri,
    shrink,
    to_bytes_range,
    worst_patch,
)
from tinyvae.evaluation.round_trip import FAMILY_KIND, REFERENCE_KIND, ModelFacts


def test_heat_map_goes_from_the_first_colour_to_the_last() -> None:
    target = torch.full((3, 3, 4, 4), 0.2)
    decoded = target.clone()
    decoded[1] += HEAT_FULL_SCALE / 4  # the square root of a quarter: the middle of the scale
    decoded[2] += 2 * HEAT_FULL_SCALE
    colours = heat_map(decoded, target)[:, :, 0, 0].float()
    assert torch.equal(colours[0], HEAT_STOPS[0]) and torch.equal(colours[2], HEAT_STOPS[-1])
    assert torch.allclose(colours[1], HEAT_STOPS[len(HEAT_STOPS) // 2], atol=1)
    assert colours.sum(dim=1).diff().min() > 0  # more error is brighter


def test_worst_patch_is_found() -> None:
    target = torch.zeros(3, 96, 160)
    decoded = target.clone()
    decoded[:, 60:76, 100:116] = 1
    top, left, height, width = worst_patch(decoded, target, side=32)
    assert (height, width) == (32, 32)
    assert top <= 60 and top + height >= 76 and left <= 100 and left + width >= 116
    assert worst_patch(decoded[:, :16, :20], target[:, :16, :20], side=32)[2:] == (16, 20)


def test_latents_become_the_same_colours_whatever_their_sign_and_order() -> None:
    latents = torch.randn(3, 16, 6, 8)
    latents[:, 4] *= 10
    pictures = latents_as_colour(latents)
    assert pictures.shape == (3, 3, 6, 8) and pictures.dtype == torch.uint8
    assert torch.equal(pictures, latents_as_colour(latents.clone()))
    # Red is the strongest direction: here channel 4, up to sign and scale.
    red, strongest = pictures[:, 0].float().flatten(), latents[:, 4].flatten()
    assert torch.corrcoef(torch.stack([red, strongest]))[0, 1].abs() > 0.97
    assert latents_as_colour(torch.zeros(1, 16, 4, 4)).shape == (1, 3, 4, 4)


def test_what_is_no_number_is_painted_magenta() -> None:
    frames = torch.full((1, 3, 2, 2), 0.5)
    frames[0, 1, 0, 0] = float("nan")
    shown = to_bytes_range(frames)
    assert shown[0, :, 0, 0].tolist() == [255, 0, 255] and shown[0, :, 1, 1].tolist() == [128, 128, 128]


def test_shrink_keeps_even_sizes_and_never_enlarges() -> None:
    frames = torch.zeros(2, 3, 101, 301, dtype=torch.uint8)
    assert shrink(frames, width=150).shape == (2, 3, 50, 150)
    assert shrink(frames, width=900).shape == (2, 3, 100, 300)


def test_pictures_as_addresses() -> None:
    image = torch.randint(0, 255, (3, 10, 12), dtype=torch.uint8)
    stored = Image.open(io.BytesIO(base64.b64decode(png_uri(image).split(",")[1])))
    assert torch.equal(torch.tensor(list(stored.tobytes())).view(10, 12, 3).movedim(-1, 0), image.long())
    assert jpeg_uri(image).startswith("data:image/jpeg;base64,")


def test_side_by_side_holds_input_output_and_error() -> None:
    target = torch.rand(2, 3, 8, 10)
    joined = side_by_side(target, [target, target + 1])
    width = side_by_side_width(10, 2)
    assert joined.shape == (2, 3, 8, width)
    assert torch.equal(joined[..., :10], to_bytes_range(target))
    start = 10 + GAP_PIXELS
    assert torch.equal(joined[..., start : start + 10], to_bytes_range(target))
    assert torch.equal(joined[0, :, 0, -1].float(), heat_map(target + 1, target)[0, :, 0, -1].float())


def facts(label: str, kind: str) -> ModelFacts:
    return ModelFacts(
        label=label,
        path=None,
        kind=kind,
        variant="taecvx",
        width=1.0,
        parameters=1,
        encoder_parameters=None,
        decoder_parameters=None,
        dtype="float32",
        sha256=None,
    )


def test_every_panel_has_a_label_of_its_own() -> None:
    labels = panel_labels([facts("student", FAMILY_KIND), facts("CogVideoX", REFERENCE_KIND)])
    assert [forms[0] for forms in labels] == [
        "input",
        "output: student",
        "teacher: CogVideoX",
        "error of student, 0 to 64 of 255",
        "error of CogVideoX, 0 to 64 of 255",
    ]
    for width in (32, 96, 400):
        target = torch.zeros(2, 3, 16, width)
        joined = side_by_side(target, [target, target])
        labelled = with_labels(joined, labels, panel_width=width)
        strip = labelled.shape[-2] - 16
        assert strip % 2 == 0 and torch.equal(labelled[..., strip:, :], joined)
        panels = [labelled[0, 0, :strip, n * (width + GAP_PIXELS) :][:, :width] for n in range(5)]
        assert all((panel > GAP_LEVEL + 100).sum() > 20 for panel in panels), "there is text above every panel"
        gap = labelled[0, 0, :strip, width : width + GAP_PIXELS]
        assert (gap == GAP_LEVEL).all(), "no label runs into its neighbour"
        different = {panel.numpy().tobytes() for panel in panels}
        assert len(different) == 5 or width == 32

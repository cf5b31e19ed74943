"""What Seraena does, in numbers and pictures: the same run without it, with it, with LPIPS, and with both.

    python benchmarks/seraena_effect.py --clips CLIPS --work output/seraena --steps 1000 --at_once 6 \\
        --weights scratch.safetensors

CLIPS is a folder with an annotations.json that has splits. Every run is `tinyvae train scratch` with the same seed and
the same clips. With ``--weights`` it goes on from a trained network at a third of the preset's rates, which is what
people do with Seraena; without, it starts from fresh weights. ``--at_once`` trains that many at the same time on one
GPU. A model that is there already is not made again. LPIPS needs its weights (docs/losses.md). Own settings instead of
the six below, each NAME:key=value,... with keys of the configuration; the first is what the others are compared with:

    ... "without:" "Seraena 1:use_seraena=true,seraena_loss_weight=1,n_seraena_frames=4"
    ... "without:" "with:use_seraena=true,seraena_loss_weight=0.1" --steps 2 \\
        --set allow_cpu=true,mixed_precision=no,height=32,width=32,model_width=0.125        # on a CPU, for a look

WORK gets table.md (PSNR, SSIM, LPIPS and both flicker measures on the validation clips: 20 frames in the middle, center
256x256; then the differences clip by clip with 95 % intervals), results.json, and crops.png: a row for each of some
validation clips, the square of its middle frame with the most detail, three times as large; a column for the source,
for the network before, and for each setting. The source alone decides which square is shown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from student_runs import Judge, Runs, as_words, slower_rates
from torch import Tensor
from torch.nn import functional as F

from tinyvae.config.load import load_config
from tinyvae.evaluation.evaluating import EvaluationResult
from tinyvae.evaluation.metrics import METRICS
from tinyvae.evaluation.pictures import to_bytes_range
from tinyvae.evaluation.statistics import paired_difference
from tinyvae.losses.perceptual import find_lpips_weights
from tinyvae.models.weights import load_model

SERAENA = "use_seraena=true,n_seraena_frames=4,seraena_loss_weight={}"
LPIPS = "perceptual_loss_weight=0.1,perceptual_frames=4"
SHOWN = ("psnr", "ssim", "lpips", "flicker_error", "flicker_energy")
FINE_TUNING_RATE = 1 / 3  # of the preset's learning rates, for a network that is trained already
ROWS, CROP = 8, 64  # clips of the contact sheet, pixels along a crop
ENLARGED, MARGIN, LINE = 3, 4, 14  # times, pixels between crops, pixels of a line of text


def default_settings(steps: int) -> list[str]:
    return [
        "without:",
        "Seraena 0.1:" + SERAENA.format(0.1),
        "Seraena 0.3:" + SERAENA.format(0.3),
        f"Seraena 0.1, second half:{SERAENA.format(0.1)},seraena_start={steps // 2}",
        "LPIPS 0.1:" + LPIPS,
        f"Seraena 0.1 and LPIPS 0.1:{SERAENA.format(0.1)},{LPIPS}",
    ]


def train_all(settings: Sequence[str], runs: Runs, weights: Path | None) -> dict[str, Path]:
    """Name -> weights; the network before is one of them where there is one."""
    start = [] if weights is None else ["--pretrained_model_path", weights, *slower_rates(FINE_TUNING_RATE)]
    made = {}
    for name, _, keys in (each.partition(":") for each in settings):
        folder = "".join(letter if letter.isalnum() or letter == "." else "_" for letter in name)
        made[name] = runs.train(folder, *start, *as_words(keys))
    models = {name: future.result() for name, future in made.items()}
    return models if weights is None else {"before": weights, **models}


def tables(results: dict[str, EvaluationResult], first: str) -> str:
    """Markdown: the means, and the differences from the setting ``first``, clip by clip."""
    heads = [f"{METRICS[name].label} {METRICS[name].unit}".strip() for name in SHOWN]
    header = f"| setting | {' | '.join(heads)} |\n|{'---|' * (len(SHOWN) + 1)}"
    means, differences = [], []
    for label, result in results.items():
        estimates = [result.summary.value(name) for name in SHOWN]
        shown = [METRICS[name].shown(None if e is None else e.mean) for name, e in zip(SHOWN, estimates, strict=True)]
        means.append(f"| {label} | {' | '.join(shown)} |")
        if label != first:
            cells = [difference_cell(name, results[first], result) for name in SHOWN]
            differences.append(f"| {label} | {' | '.join(cells)} |")
    note = f"Differences from *{first}* over the same clips, with 95 % intervals of their mean:"
    return "\n".join([header, *means, "", note, "", header, *differences]) + "\n"


def difference_cell(metric: str, baseline: EvaluationResult, candidate: EvaluationResult) -> str:
    found, info = paired_difference(metric, baseline.by_name(), candidate.by_name()), METRICS[metric]
    if found is None:
        return "not measured"
    return (
        f"{info.shown_difference(found.difference.mean)} "
        f"({info.interval(found.difference.low, found.difference.high)}), {found.verdict}"
    )


def detailed_square(frame_CHW: Tensor, side: int) -> tuple[int, int]:
    """(top, left) of the square with the most detail: the largest steps from pixel to pixel."""
    gray = frame_CHW.float().mean(dim=0)
    steps = gray.diff(dim=0)[:, 1:].abs() + gray.diff(dim=1)[1:].abs()
    means = F.avg_pool2d(steps[None, None], side - 1, stride=8)[0, 0]
    row, column = divmod(int(means.argmax()), means.shape[1])
    return row * 8, column * 8


@torch.no_grad()
def crop_rows(models: dict[str, Path], judge: Judge) -> dict[str, list[Tensor]]:
    """Clip -> its crops uint8 CHW: of the source, then of each model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places = torch.linspace(0, len(judge.clips) - 1, min(ROWS, len(judge.clips))).round().long().tolist()
    chosen = {judge.clips[place].name: judge.clips[place].frames for place in places}
    crops: dict[str, list[Tensor]] = {}
    windows: dict[str, tuple[int, slice, slice]] = {}
    for name, frames in chosen.items():
        assert frames is not None
        middle = len(frames) // 2
        top, left = detailed_square(frames[middle], CROP)
        windows[name] = (middle, slice(top, top + CROP), slice(left, left + CROP))
        crops[name] = [frames[middle][:, windows[name][1], windows[name][2]]]
    for file in models.values():
        codec = load_model(file, device=device, dtype=torch.float32)
        for name, frames in chosen.items():
            assert frames is not None
            frame, rows_of, columns_of = windows[name]
            decoded = codec.decode_video(codec.encode_video(frames[None].to(device).float() / 255))[0, frame]
            crops[name].append(to_bytes_range(decoded[:, rows_of, columns_of]).cpu())
    return crops


def contact_sheet(crops: dict[str, list[Tensor]], heads: Sequence[str]) -> Image.Image:
    """Rows of crops, enlarged without smoothing, under the heads; the clip's name above each row."""
    side = ENLARGED * next(iter(crops.values()))[0].shape[-1]
    font = ImageFont.load_default()
    size = (len(heads) * (side + MARGIN) + MARGIN, LINE + len(crops) * (side + LINE + MARGIN) + MARGIN)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for column, head in enumerate(heads):
        pen.text((MARGIN + column * (side + MARGIN), 1), head, fill="black", font=font)
    for row, (name, pictures) in enumerate(crops.items()):
        top = LINE + row * (side + LINE + MARGIN)
        pen.text((MARGIN, top + 1), name, fill="gray", font=font)
        for column, picture in enumerate(pictures):
            image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
            place = (MARGIN + column * (side + MARGIN), top + LINE)
            sheet.paste(image.resize((side, side), Image.Resampling.NEAREST), place)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="each NAME:key=value,...; default: six, see above")
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--weights", type=Path, help="a trained network to go on from")
    parser.add_argument("--steps", type=int, default=1000, help="of each training")
    parser.add_argument("--at_once", type=int, default=1, help="trainings that share the GPU")
    parser.add_argument("--set", default="", help="key=value,... for every run")
    arguments = parser.parse_args()
    if arguments.weights is not None and not arguments.weights.is_file():
        parser.error(f"--weights {arguments.weights}: there is no such file.")
    if nameless := [each for each in arguments.settings if ":" not in each]:
        parser.error(f"{nameless[0]!r} has no name; write NAME:key=value,... ('without:' changes nothing).")
    arguments.work.mkdir(parents=True, exist_ok=True)
    settings = arguments.settings or default_settings(arguments.steps)
    if not arguments.settings:
        find_lpips_weights(None)  # two of the six need them; else it is told when the others are done
    for each in settings:  # for the same reason
        load_config("scratch", as_words(f"{arguments.set},{each.partition(':')[2]}"))
    judge = Judge(arguments.clips, with_lpips=True)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        kept = {"steps": arguments.steps, "at_once": arguments.at_once, "settings": as_words(arguments.set)}
        runs = Runs(arguments.clips, arguments.work, pool, **kept)
        models = train_all(settings, runs, arguments.weights)
    results = {name: judge.score(file, name) for name, file in models.items()}
    first = settings[0].partition(":")[0]
    text = f"{arguments.steps} steps each.\n\n" + tables(results, first)
    (arguments.work / "table.md").write_text(text)
    figures = {name: result.summary.means() for name, result in results.items()}
    (arguments.work / "results.json").write_text(json.dumps({"settings": settings, "figures": figures}, indent=1))
    crops = crop_rows(models, judge)
    contact_sheet(crops, ["source", *models]).save(arguments.work / "crops.png", optimize=True)
    print(f"\n{text}\n{arguments.work / 'crops.png'}")


if __name__ == "__main__":
    main()

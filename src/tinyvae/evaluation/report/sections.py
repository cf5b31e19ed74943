"""The sections of the report with numbers: plain HTML tables that read without scripts; ``report.js`` adds the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tinyvae.evaluation.compare import Comparison
from tinyvae.evaluation.evaluating import ClipResult, EvaluationResult, EvaluationSettings
from tinyvae.evaluation.evidence import ClipEvidence, LatentPictures, WorstFrame
from tinyvae.evaluation.metrics import METRICS, MetricInfo, sortable
from tinyvae.evaluation.pictures import HEAT_FULL_SCALE, HEAT_STOPS
from tinyvae.evaluation.statistics import Estimate, PairedDifference

MAX_POINTS = 400  # of one curve in a page; longer ones are thinned evenly, first and last kept

Curves = dict[str, list[tuple[float, float]]]


def find_run_folder(model_path: Path) -> Path | None:
    """The run that a model belongs to: the path itself, or up to two folders above it, that holds ``metrics.jsonl``."""
    for folder in (model_path, *model_path.absolute().parents[:2]):
        if (folder / "metrics.jsonl").is_file():
            return folder
    return None


def read_training_curves(run_folder: Path) -> Curves:
    """``{"train/loss": [(step, value), ...], ...}`` of a run; lines cut off by a crash are left out."""
    curves: dict[str, dict[float, float]] = {}
    metrics = run_folder / "metrics.jsonl"
    if metrics.is_file():
        for line in metrics.read_text(errors="replace").splitlines():
            _take(curves, _parsed(line), prefix="")
    history = run_folder / "validation_history.json"
    if history.is_file():
        content = _parsed(history.read_text(errors="replace"))
        entries = content if isinstance(content, list) else (content or {}).get("history", [])
        for entry in entries:
            _take(curves, entry, prefix="val/")
    return {key: thin(sorted(points.items())) for key, points in sorted(curves.items(), key=_order) if points}


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` points, evenly chosen, with the first and the last."""
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(i * (len(points) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def is_detail(key: str, points: list[tuple[float, float]]) -> bool:
    """Whether a curve is for those who look closer: spreads, counts, weights without averaging, nothing but zero."""
    return (
        key.endswith(("_std", "/num_clips", "/train_loss"))
        or key.startswith("val_raw/")
        or not any(value for _, value in points)
    )


def _take(curves: dict[str, dict[float, float]], entry: Any, *, prefix: str) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int | float):
        return
    values = {**entry, **entry["metrics"]} if isinstance(entry.get("metrics"), dict) else entry
    for key, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "step" and is_number and math.isfinite(value):
            name = key if "/" in key else f"{prefix}{key}"
            curves.setdefault(name, {}).setdefault(float(entry["step"]), float(value))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _order(item: tuple[str, Any]) -> tuple[int, str]:
    key = item[0]
    groups = ("val/psnr", "val/ssim", "val/lpips", "val/flicker", "val/", "train/loss", "train/")
    return next((place for place, start in enumerate(groups) if key.startswith(start)), len(groups)), key


TILES = ("psnr", "ssim", "lpips", "flicker_error")
SPARK_POINTS = 48
Evaluations = Sequence[EvaluationResult]


def header_html(evaluations: Evaluations) -> str:
    title = ' <span class="vs">against</span> '.join(escape(e.model.label) for e in evaluations)
    first = evaluations[0]
    facts = [
        f"{first.summary.num_clips} clips, {first.summary.num_frames} frames",
        f"data {escape(first.settings.data)}"
        + (f", split {escape(first.settings.split)}" if first.settings.split else ""),
        *([f"the middle {first.settings.max_frames} frames of each"] if first.settings.middle else []),
        _size_in_words(first.settings),
        escape(first.environment.get("date", "")),
    ]
    kind = "Evaluation" if len(evaluations) == 1 else "Comparison"
    items = "".join(f"<li>{fact}</li>" for fact in facts)
    return f'<div class="eyebrow">tinyvae {kind.lower()}</div><h1>{title}</h1><ul class="facts">{items}</ul>'


def _size_in_words(settings: EvaluationSettings) -> str:
    if settings.size is None:
        return "size as in the files"
    how = "cropped" if settings.middle and not settings.middle.scaled else "scaled"
    return f"{how} to {settings.size[1]}×{settings.size[0]} pixels"


def summary_section(evaluations: Evaluations, comparison: Comparison | None) -> str:
    parts = ["<h2>Summary</h2>", _problems(evaluations)]
    if comparison is None:
        only = evaluations[0]
        parts += [_tiles(only), _summary_table(only)]
    else:
        parts += [_comparison_table(comparison), _cost_table(evaluations)]
    parts.append(
        "<p>Means over clips; the range is the 95 % confidence interval of the mean, over clips. "
        "Decoded frame <i>j</i> is compared with input frame <i>j</i>.</p>"
    )
    return "".join(parts)


def _tiles(result: EvaluationResult) -> str:
    tiles = []
    for name in TILES:
        info, estimate = METRICS[name], result.summary.value(name)
        if estimate is None:
            tiles.append(_tile(info.label, '<div class="value absent">not measured</div>', ""))
            continue
        unit = f"<small>{escape(info.unit)}</small>" if info.unit else ""
        value = f'<div class="value">{_shown(info, estimate.mean)}{unit}</div>'
        tiles.append(_tile(info.label, value, _interval_words(info, estimate)))
    cost = result.cost
    tiles.append(
        _tile(
            "Decoding",
            f'<div class="value">{_short(cost.decode_fps)}<small>frames/s</small></div>',
            f"{cost.decode_megapixels_per_s:.1f} Mpixel/s",
        )
    )
    tiles.append(
        _tile(
            "Parameters",
            f'<div class="value">{_millions(result.model.parameters)}<small>M</small></div>',
            escape(_variant_words(result)),
        )
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(name: str, value: str, note: str) -> str:
    return f'<div class="tile"><div class="name">{escape(name)}</div>{value}<div class="note">{note}</div></div>'


def _summary_table(result: EvaluationResult) -> str:
    rows = []
    for name, info in METRICS.items():
        estimate = result.summary.value(name)
        values = [(clip.name, v) for clip in result.clips if (v := clip.metrics.value(name)) is not None]
        if estimate is None or not values:
            cells = '<td class="num">not measured</td><td></td><td></td><td></td><td></td>'
        else:
            best = min(values, key=lambda pair: info.badness(pair[1]))
            worst = max(values, key=lambda pair: info.badness(pair[1]))
            cells = (
                f'<td class="num">{_shown(info, estimate.mean)}</td>'
                f'<td class="num">{_interval_words(info, estimate)}</td>'
                f'<td class="num">{_shown(info, estimate.std)}</td>'
                f'<td class="num" title="{escape(best[0])}">{_shown(info, best[1])}</td>'
                f'<td class="num" title="{escape(worst[0])}">{_shown(info, worst[1])}</td>'
            )
        rows.append(
            f'<tr><th scope="row">{_metric_name(info)}</th>{cells}<td class="meaning">{escape(info.meaning)}</td></tr>'
        )
    return (
        '<div class="scroll"><table><thead><tr><th>Metric</th><th class="num">Mean</th>'
        '<th class="num">95 % interval</th><th class="num">Std over clips</th><th class="num">Best clip</th>'
        '<th class="num">Worst clip</th><th>What it is</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>" + _cost_table([result])
    )


def _comparison_table(comparison: Comparison) -> str:
    evaluations = comparison.evaluations
    heads = "".join(f'<th class="num">{_swatch(i)}{escape(e.model.label)}</th>' for i, e in enumerate(evaluations))
    heads += "".join(
        f'<th class="num">{escape(c.label)} − {escape(comparison.baseline.model.label)}</th><th>Verdict</th>'
        for c in comparison.candidates
    )
    rows = []
    for name, info in METRICS.items():
        cells = ""
        for evaluation in evaluations:
            estimate = evaluation.summary.value(name)
            winner = " winner" if comparison.winners.get(name) == evaluation.model.label else ""
            cells += f'<td class="num{winner}">{_shown(info, estimate.mean) if estimate else "not measured"}</td>'
        for candidate in comparison.candidates:
            cells += _difference_cells(info, candidate.difference(name))
        rows.append(f'<tr><th scope="row">{_metric_name(info)}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table class="comparison"><thead><tr><th>Metric</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        "<p>Differences are paired clip by clip; <b>●</b> marks the winner by mean. <i>Unclear</i>: the interval of "
        "the difference holds zero. For flicker energy, best at zero, sizes are compared.</p>"
    )


def _difference_cells(info: MetricInfo, paired: PairedDifference | None) -> str:
    if paired is None:
        return '<td class="num">not measured</td><td></td>'
    interval = _interval_words(info, paired.difference)
    count = paired.difference.count
    return (
        f'<td class="num">{info.shown_difference(paired.difference.mean)}<span class="ci">{interval}</span></td>'
        f'<td><span class="verdict {paired.verdict}">{paired.verdict}</span> '
        f'<span class="unit">wins {paired.wins} of {count}</span></td>'
    )


def _cost_table(evaluations: Evaluations) -> str:
    rows = ""
    for index, result in enumerate(evaluations):
        cost, model = result.cost, result.model
        peak = f"{cost.peak_memory_bytes / 2**20:,.0f} MiB" if cost.peak_memory_bytes is not None else "not measured"
        swatch = _swatch(index) if len(evaluations) > 1 else ""
        rows += (
            f'<tr><th scope="row">{swatch}{escape(model.label)}</th><td>{escape(_variant_words(result))}</td>'
            f'<td class="num">{model.parameters:,}</td><td>{escape(model.dtype)}</td>'
            f'<td class="num">{_short(cost.encode_fps)}</td><td class="num">{_short(cost.decode_fps)}</td>'
            f'<td class="num">{peak}</td></tr>'
        )
    kind = evaluations[0].cost.memory_kind
    return (
        '<div class="scroll" style="margin-top:16px"><table><thead><tr><th>Model</th><th>Network</th>'
        '<th class="num">Parameters</th><th>Precision</th><th class="num">Encode, frames/s</th>'
        f'<th class="num">Decode, frames/s</th><th class="num">Peak {kind}</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _problems(evaluations: Evaluations) -> str:
    html = ""
    skipped = {s.name: s.reason for e in evaluations for s in e.skipped}
    if skipped:
        listed = "".join(f"<li>{escape(reason)}</li>" for reason in list(skipped.values())[:20])
        more = f"<li>and {len(skipped) - 20} more, see results.json</li>" if len(skipped) > 20 else ""
        noun = "video was" if len(skipped) == 1 else "videos were"
        html += f'<div class="notice"><b>{len(skipped)} {noun} skipped</b><ul>{listed}{more}</ul></div>'
    for note in dict.fromkeys(note for e in evaluations for note in e.notes):
        html += f'<div class="notice mild">{escape(note[:1].upper() + note[1:])}</div>'
    return html


def clip_section(evaluations: Evaluations, listed: Sequence[str]) -> str:
    tables = [{clip.name: clip for clip in e.clips} for e in evaluations]
    measured = [info for name, info in METRICS.items() if any(e.summary.value(name) for e in evaluations)]
    many = len(evaluations) > 1
    heads = _sort_head("Clip") + _sort_head("Frames", number=True) + _sort_head("Size", number=True)
    for info in measured:
        for index, evaluation in enumerate(evaluations):
            label = f"{_swatch(index)}{escape(evaluation.model.label)}" if many else _short_name(info)
            heads += _sort_head(
                label, number=True, metric=info.name if many else None, hidden=many and info.name != "psnr"
            )
        if many:
            heads += _sort_head("Difference", number=True, metric=info.name, hidden=info.name != "psnr")
    heads += "<th>PSNR by frame</th>"
    rows = ""
    for name in listed:
        clips = [table[name] for table in tables]
        frames, height, width = clips[0].metrics.num_frames, clips[0].height, clips[0].width
        cells = (
            f'<th scope="row" title="{escape(name)}">{escape(name)}</th>'
            f'<td class="num" data-value="{frames}">{frames}</td>'
            f'<td class="num" data-value="{height * width}">{width}×{height}</td>'
        )
        for info in measured:
            cells += "".join(_value_cell(info, clip, grouped=many) for clip in clips)
            cells += _difference_cell(info, clips[0], clips[-1]) if many else ""
        rows += f'<tr data-clip="{escape(name)}">{cells}<td>{_spark(clips[-1])}</td></tr>'
    total = min(len(e.clips) for e in evaluations)
    less = (
        f" The {len(listed)} worst and best of {total} are listed; results.json has all." if len(listed) < total else ""
    )
    labels = [escape(evaluation.model.label) for evaluation in evaluations]
    less += f" The difference is {labels[-1]} − {labels[0]}." if many else ""
    return (
        f"<h2>Clips</h2><p>Click a heading to sort, a row to see the clip's frames and film.{less}</p>"
        f'<div class="bar">{_metric_switch("table-metric", measured) if many else ""}'
        '<input type="search" id="clip-search" placeholder="Find a clip" aria-label="Find a clip"></div>'
        f'<div class="clips"><div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></div>"
    )


def _sort_head(label: str, *, number: bool = False, metric: str | None = None, hidden: bool = False) -> str:
    attributes = ' class="num"' if number else ""
    attributes += f' data-metric="{metric}"' if metric else ""
    attributes += " hidden" if hidden else ""
    return f'<th scope="col"{attributes}><button type="button" class="sort">{label}</button></th>'


def _value_cell(info: MetricInfo, clip: ClipResult, *, grouped: bool) -> str:
    value = clip.metrics.value(info.name)
    attributes = f' data-metric="{info.name}"' if grouped else ""
    attributes += " hidden" if grouped and info.name != "psnr" else ""
    if value is None or not math.isfinite(value):
        return f'<td class="num"{attributes} data-value="">{"–" if value is None else "NaN"}</td>'
    return f'<td class="num"{attributes} data-value="{value:.8g}">{_shown(info, value)}</td>'


def _difference_cell(info: MetricInfo, first: ClipResult, last: ClipResult) -> str:
    """The last model less the first on one clip, as it is paired: of sizes for a metric that is best at zero."""
    values = [clip.metrics.value(info.name) for clip in (first, last)]
    attributes = f' data-metric="{info.name}"' + (" hidden" if info.name != "psnr" else "")
    if any(value is None or not math.isfinite(value) for value in values):
        return f'<td class="num"{attributes} data-value="">–</td>'
    before, after = (abs(value) if info.better == "zero" else value for value in values if value is not None)
    shown = info.shown_difference(after - before)
    return f'<td class="num"{attributes} data-value="{after - before:.8g}">{shown}</td>'


def _spark(clip: ClipResult) -> str:
    values = [v for v in clip.metrics.psnr_by_frame if math.isfinite(v)]
    step = max(1, len(values) // SPARK_POINTS)
    points = ",".join(f"{value:.2f}" for value in values[::step])
    return f'<svg class="spark" viewBox="0 0 96 22" aria-hidden="true" data-values="{points}"></svg>' if points else ""


def curve_section(evaluations: Evaluations) -> str:
    with_frames = [
        info for name, info in METRICS.items() if any(c.metrics.by_frame(name) for e in evaluations for c in e.clips)
    ]
    return (
        "<h2>Frame by frame</h2><p>Click into the curve to see that frame in the film above.</p>"
        '<div class="bar"><select id="curve-clip" aria-label="Clip"></select>'
        f"{_metric_switch('curve-metric', with_frames)}</div>"
        '<div class="chart"><div class="legend" id="curve-legend"></div><div id="curve-chart"></div></div>'
    )


def _metric_switch(identifier: str, infos: Sequence[MetricInfo]) -> str:
    buttons = "".join(
        f'<button type="button" value="{info.name}" aria-pressed="{str(info is infos[0]).lower()}">'
        f"{info.label}</button>"
        for info in infos
    )
    return f'<div class="seg" id="{identifier}" role="group" aria-label="Metric">{buttons}</div>'


def training_section(curves: Curves, label: str | None = None) -> str:
    """The curves of a run, the telling ones open; ``label`` names the model where there are several."""
    if not curves:
        return ""
    main = [key for key in curves if not is_detail(key, curves[key])]
    rest = [key for key in curves if key not in main]
    more = f"<details><summary>{len(rest)} more curves</summary>{_charts(rest)}</details>" if rest else ""
    which = f"The run that {escape(label)} comes from" if label else "The run this model comes from"
    return f"<h2>Training</h2><p>{which}, by step.</p>{_charts(main)}{more}"


def _charts(keys: Sequence[str]) -> str:
    charts = "".join(
        f'<div class="chart"><div class="head"><h3>{escape(key)}</h3><span class="last"></span></div>'
        f'<div data-training="{escape(key)}"></div></div>'
        for key in keys
    )
    return f'<div class="multiples">{charts}</div>'


def environment_section(evaluations: Evaluations, command: str) -> str:
    facts = {**evaluations[0].environment}
    for result in evaluations:
        model = result.model
        words = [model.path or "in memory", model.kind]
        words += [f"sha256 {model.sha256[:16]}…"] if model.sha256 else []
        facts[f"model {model.label}"] = ", ".join(words)
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    return f'<h2>Environment</h2><pre>{escape(command)}</pre><dl class="env">{items}</dl>'


def footer_text(evaluations: Evaluations) -> str:
    return f"Made by tinyvae {escape(evaluations[0].environment.get('tinyvae', ''))}. This file needs no network."


def _variant_words(result: EvaluationResult) -> str:
    width = result.model.width
    return result.model.variant + (f", width {width:g}" if width is not None and width != 1 else "")


def _metric_name(info: MetricInfo) -> str:
    return escape(info.label) + (f' <span class="unit">{escape(info.unit)}</span>' if info.unit else "")


def _short_name(info: MetricInfo) -> str:
    """The name alone, for a narrow column; the unit shows when the pointer rests on it."""
    return f'<span title="{escape(f"{info.unit} {info.meaning}".strip())}">{escape(info.label)}</span>'


def _interval_words(info: MetricInfo, estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "one clip"
    return f"{_shown(info, estimate.low)} … {_shown(info, estimate.high)}"


def _shown(info: MetricInfo, value: float | None) -> str:
    return "–" if value is None else info.shown(value)


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background:var(--series-{index % 5})"></i>'


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f}" if count < 1e7 else f"{count / 1e6:.1f}"


def _short(number: float) -> str:
    return f"{number:,.1f}" if number < 100 else f"{number:,.0f}"


def player_section(evidence: Sequence[ClipEvidence]) -> str:
    if not evidence:
        return ""
    picks = "".join(
        f'<button type="button" aria-pressed="false"><b>{escape(clip.name)}</b><span>{escape(clip.why)}, '
        f"{_worst_psnr(clip)} dB at its worst</span></button>"
        for clip in evidence
    )
    speeds = "".join(
        f'<option value="{v}">{t}</option>' for v, t in ((1, "1×"), (0.5, "½×"), (0.25, "¼×"), (0.1, "⅒×"))
    )
    stops = ", ".join(f"rgb({r:.0f} {g:.0f} {b:.0f})" for r, g, b in HEAT_STOPS.tolist())
    return (
        "<h2>Films</h2><p>Input, output and error in step. Films are compressed for this page; all numbers come from "
        f'the frames themselves.</p><div class="picks">{picks}</div>'
        '<div id="stage" class="stage" data-view="side" tabindex="0">'
        '<video muted playsinline loop preload="auto"></video><div class="panels"></div><div class="controls">'
        '<span class="pair"><button type="button" name="back" aria-label="One frame back">◂</button>'
        '<button type="button" name="play" aria-label="Play">▶</button>'
        '<button type="button" name="forward" aria-label="One frame forward">▸</button></span>'
        '<input type="range" min="0" value="0" step="1" aria-label="Frame"><output>frame 0</output>'
        f'<select name="speed" aria-label="Speed">{speeds}</select>'
        '<button type="button" name="loop" aria-pressed="true">Loop</button>'
        '<span class="pair"><button type="button" data-view-button="side" aria-pressed="true">Side by side</button>'
        '<button type="button" data-view-button="wipe" aria-pressed="false">Wipe</button></span>'
        '<select name="wipe-panel" aria-label="Compare input with" hidden></select></div></div>'
        f'<div class="scale"><span>Error 0</span><i style="background:linear-gradient(90deg, {stops})"></i>'
        f"<span>{HEAT_FULL_SCALE * 255:.0f} levels of 255 and above (square-root scale)</span></div>"
    )


def _worst_psnr(clip: ClipEvidence) -> str:
    return METRICS["psnr"].shown(min((worst.psnr for worst in clip.worst_frames), key=sortable))


def worst_section(evidence: Sequence[ClipEvidence], num_models: int) -> str:
    cards = [(clip, worst) for clip in evidence for worst in clip.worst_frames]
    cards.sort(key=lambda pair: sortable(pair[1].psnr))
    if not cards:
        return ""
    html = "".join(_worst_card(clip, worst, num_models) for clip, worst in cards)
    return (
        "<h2>Worst frames</h2><p>The worst frame of each clip shown above, and in it the square with the largest "
        f'error, pixel by pixel.</p><div class="worst">{html}</div>'
    )


def _worst_card(clip: ClipEvidence, worst: WorstFrame, num_models: int) -> str:
    left, top, width, height = (100 * share for share in worst.box)
    model = f"{escape(worst.model)}, " if num_models > 1 else ""
    crops = "".join(
        f'<figure><img class="pixels" alt="{name} of the patch" src="{uri}"><figcaption>{name}</figcaption></figure>'
        for name, uri in (("input", worst.input), ("output", worst.output), ("error", worst.error))
    )
    return (
        f'<div class="card"><div class="head"><div><h3>{escape(clip.name)}</h3>'
        f'<div class="sub">{model}frame {worst.frame}, '
        f"{METRICS['psnr'].shown(worst.psnr)} dB<br>{worst.patch_width}×{worst.patch_height} pixels</div></div>"
        f'<span class="where"><img alt="the frame" src="{worst.whole}">'
        f'<i style="left:{left:.2f}%;top:{top:.2f}%;width:{width:.2f}%;height:{height:.2f}%"></i></span></div>'
        f'<div class="crops">{crops}</div></div>'
    )


def latent_section(evidence: Sequence[ClipEvidence], num_models: int) -> str:
    cards = "".join(_latent_card(clip, latents, num_models) for clip in evidence for latents in clip.latents)
    if not cards:
        return ""
    return (
        "<h2>Latents</h2><p>The three strongest directions of each clip's latents as red, green and blue. "
        "One square is one latent pixel. Blockwise noise or a grid here shows again in the output.</p>"
        f'<div class="latents">{cards}</div>'
    )


def _latent_card(clip: ClipEvidence, latents: LatentPictures, num_models: int) -> str:
    figures = "".join(
        f'<figure><img alt="latent {place}" src="{uri}"><figcaption>latent {place}</figcaption></figure>'
        for place, uri in zip(latents.places, latents.pictures, strict=True)
    )
    model = f'<div class="sub">{escape(latents.model)}</div>' if num_models > 1 else ""
    return f'<div class="card"><h3>{escape(clip.name)}</h3>{model}<div class="row">{figures}</div></div>'

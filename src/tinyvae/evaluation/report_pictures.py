"""The sections of the report that show pictures of clips: films, worst frames, latents."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tinyvae.evaluation.evidence import ClipEvidence, LatentPictures, WorstFrame
from tinyvae.evaluation.metrics import METRICS, sortable
from tinyvae.evaluation.pictures import HEAT_FULL_SCALE, HEAT_STOPS


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

"""Draw the plots of docs/results.md from the tables in the documents: no number is typed twice.

python docs/images/draw_results.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "results.md"
GPU = FOLDER.parents[1] / "benchmarks" / "results" / "2026-11-16-gpu.md"

WIDTH, LEFT, RIGHT = 640, 215, 110
COLORS = ("#3f51b5", "#e07b39")
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
font-family="sans-serif" font-size="13" fill="#333">
<rect width="{width}" height="{height}" rx="6" fill="#fff"/>
<text x="16" y="24" font-weight="bold">{title}</text>
{body}
</svg>
"""


def table_rows(document: Path, header: str, *, section: str) -> list[list[str]]:
    """The cells of the first table of a section that begins with the line ``header``."""
    lines = document.read_text().split(f"\n{section}", 1)[1].splitlines()
    rows = []
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def number(cell: str) -> float:
    """The first number of a cell: ``1,200``, ``**28.15 dB**``, ``76.7 (2.3x)``."""
    found = re.search(r"\d[\d,]*(?:\.\d+)?", cell)
    assert found, cell
    return float(found[0].replace(",", ""))


def text(x: float, y: float, words: str, anchor: str = "start", **more: str) -> str:
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def bars(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> str:
    """Horizontal bars from zero. A group is a name and its bars, each with a label and a value."""
    longest = max(value for _, group in groups for _, value in group)
    body, y = [], 44.0
    for name, group in groups:
        if name:
            body.append(text(16, y + 14, name, font_style="italic"))
            y += 24
        for place, (label, value) in enumerate(group):
            length = value / longest * (WIDTH - LEFT - RIGHT)
            color = COLORS[place % 2] if name else COLORS[0]
            body.append(text(LEFT - 8, y + 14, label, "end"))
            body.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{length:.1f}" height="19" fill="{color}"/>')
            body.append(text(LEFT + length + 6, y + 14, f"{value:g} {unit}"))
            y += 25
        y += 6
    return FRAME.format(width=WIDTH, height=round(y + 8), title=escape(title), body="\n".join(body))


def curves(
    title: str, xs: Sequence[float], lines: Sequence[tuple[str, Sequence[float]]], units: tuple[str, str]
) -> str:
    """Lines over common x. The y axis holds the whole numbers around all values, and x starts at zero."""
    left, right, top, bottom = 56, WIDTH - 24, 60, 300
    low = int(min(min(ys) for _, ys in lines))
    high = int(max(max(ys) for _, ys in lines)) + 1

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / max(xs) * (right - left), bottom - (y - low) / (high - low) * (bottom - top)

    body = []
    for tick in range(low, high + 1):
        y = at(0, tick)[1]
        body.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>')
        body.append(text(left - 8, y + 4, str(tick), "end"))
    body += [text(at(x, low)[0], bottom + 20, f"{x:g}", "middle") for x in xs]
    body += [text(16, top - 10, units[1]), text(right, bottom + 40, units[0], "end")]
    for place, (label, ys) in enumerate(lines):
        color = COLORS[place]
        points = [at(x, y) for x, y in zip(xs, ys, strict=True)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        body.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        body.append(text(right, bottom - 40 + 20 * place, label, "end", fill=color))
    return FRAME.format(width=WIDTH, height=bottom + 50, title=escape(title), body="\n".join(body))


def scratch_curve() -> str:
    rows = table_rows(
        RESULTS, "| step | seconds | averaged weights | raw weights |", section="## From scratch, no teacher"
    )
    lines = [
        (name, [number(row[column]) for row in rows]) for name, column in (("averaged weights", 2), ("raw weights", 3))
    ]
    title = "From scratch on one H200: PSNR of validation clips"
    return curves(title, [number(row[1]) for row in rows], lines, ("seconds of training", "dB"))


def codec_speed() -> str:
    header = "| | plain | fused | ratio | asked | share | error fused / plain | stream of the whole | call, GiB |"
    rows = table_rows(GPU, header, section="## The kernels of the evening")[:2]  # taehv: decode, encode
    groups = [(row[0].split(", ")[1], [("plain", number(row[1])), ("fused", number(row[2]))]) for row in rows]
    return bars("49 frames of 480x720, taehv, fp16, one H200 (less is better)", groups, "ms")


def teacher_recipe() -> str:
    rows = table_rows(GPU, "| | frames/s | memory |", section="## The teacher recipe")
    shown = [(row[0].replace("`", "").replace("as shipped now, ", "now, "), number(row[1])) for row in rows]
    return bars("Training with a CogVideoX teacher, one H200 (more is better)", [("", shown)], "frames/s")


PLOTS = {"results-scratch.svg": scratch_curve, "results-codec.svg": codec_speed, "results-teacher.svg": teacher_recipe}


def main() -> None:
    for name, draw in PLOTS.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()

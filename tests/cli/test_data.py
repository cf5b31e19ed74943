"""``tinyvae data``: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from PIL import Image, ImageFont

from tests.video import small_videos
from tinyvae.cli import main as cli
from tinyvae.data import check
from tinyvae.data.index import open_index
from tinyvae.errors import MissingFileError, UserError

write_video = partial(small_videos.write_video, frames=20, width=160, height=136)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data_verb")
    for number in range(6):
        write_video(folder / f"v{number}.mp4", seed=number)
    write_video(folder / "short.mp4", frames=6)
    return folder


def run(*words: object) -> int:
    return cli.run(["data", *map(str, words)])


def test_index_then_check_an_index(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("index", folder, "--output", tmp_path / "v.tvi", "--workers", 0) == 0
    assert "7 files" in capsys.readouterr().out
    assert len(open_index(tmp_path / "v.tvi")) == 7
    sheet = tmp_path / "sheet.png"
    assert run("check", tmp_path / "v.tvi", "--contact_sheet", sheet, "--samples", 4) == 0
    printed = capsys.readouterr().out
    assert "7 good, 0 bad" in printed and "160x136" in printed and "24 fps" in printed and "h264" in printed
    assert "6 files" not in printed.split("LENGTHS")[0] and "1 too short" in printed
    values = {line.split("  ")[1].strip(): line.split()[-4:] for line in printed.splitlines() if "float32" in line}
    kind, low, high, mean = values["model input"]
    assert kind == "float32" and 0 <= float(low) < 0.2 and 0.8 < float(high) <= 1 and 0.2 < float(mean) < 0.8
    batch = next(line.split() for line in printed.splitlines() if line.startswith("  batch"))
    assert batch[1] == "uint8" and 0 <= int(batch[2]) < 40 < 215 < int(batch[3]) <= 255
    with Image.open(sheet) as picture:
        assert picture.format == "PNG" and picture.width > 1000 and len(picture.getcolors(1 << 24) or []) > 100


def test_check_a_folder_with_a_preset(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("check", folder, "--preset", "test", "--contact_sheet", tmp_path / "s.png", "--workers", 0)
    assert run(*words, "--frames", 9, "--train_split", 0.5) == 0
    printed = capsys.readouterr().out
    assert "USE BY PRESET TEST" in printed and "clips of 9 frames" in printed and "128x128" in printed


def test_what_a_preset_validates_with_counts_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the run: files that are large enough to train and too small to validate."""
    words = ("check", folder, "--preset", "scratch", "--contact_sheet", tmp_path / "s.png", "--workers", 0)
    assert run(*words, "--size", "32x32") == 1
    assert "can give a validation clip of 20 frames at 256x256" in capsys.readouterr().out


def test_data_that_cannot_be_used_ends_with_1_and_says_why(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.png"
    assert run("check", folder, "--size", "480x720", "--contact_sheet", sheet, "--workers", 0) == 1
    printed = capsys.readouterr().out
    assert "NOT USABLE" in printed and "smaller than the clip size" in printed and not sheet.exists()
    (tmp_path / "bad").mkdir()
    write_video(tmp_path / "bad" / "good.mp4")
    write_video(tmp_path / "bad" / "fine.mp4")
    (tmp_path / "bad" / "empty.mp4").touch()
    assert run("check", tmp_path / "bad", "--contact_sheet", sheet, "--workers", 0) == 1
    printed = capsys.readouterr().out
    assert "empty.mp4: the file is empty" in printed and "above the limit of 5.0%" in printed
    assert str(tmp_path / "bad") in printed.splitlines()[-1], "the message names the data, not a temporary index"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_names_and_bars_that_the_terminal_cannot_show(
    tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "good.mp4")
    (tmp_path / os.fsdecode(b"bad\xff.mp4")).touch()
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding, write_through=True))  # errors: strict
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "check", str(tmp_path), "--contact_sheet", str(tmp_path / "s.png"), "--workers", "0"])
    assert ended.value.code == 1
    assert rb"bad\udcff.mp4: the file is empty" in shown.getvalue()
    assert ("1  " + ("█" if encoding == "utf-8" else "#") * 24).encode(encoding) in shown.getvalue()


@pytest.mark.parametrize("has_fonts", [True, False])
def test_names_beyond_ascii_are_told_apart_in_the_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_fonts: bool
) -> None:
    if not has_fonts:
        monkeypatch.setattr(check, "_fonts_with", lambda letters: ())
    monkeypatch.chdir(tmp_path)
    heads = set()
    for name in ("中", "文", "ü", "ø", "bad\udcff", "bad\udcfe"):
        write_video(tmp_path / name / "clip.mp4")
        assert run("check", name, "--contact_sheet", "sheet.png", "--workers", 0, "--train_split", 1) == 0
        with Image.open("sheet.png") as picture:
            heads.add(picture.crop((0, 0, picture.width, check.HEADER_HEIGHT)).tobytes())
    assert len(heads) == 6, "the title names the folder"


def test_letters_that_no_font_has_are_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ImageFont.load_default(size=13).getname()
    for text in ("a-Z_09 (x)", "ü\U0010ffff"):
        drawn, font = check.drawable(text, 13)
        assert font.getname() == own if text.isascii() else drawn.endswith(r"\U0010ffff")
    try:
        system = ImageFont.truetype("DejaVuSans.ttf", 13)
    except OSError:
        pytest.skip("the system has no DejaVu Sans")
    monkeypatch.setattr(check, "_fonts_with", lambda letters: ("none.ttf", "DejaVuSans.ttf"))
    for text, shown in (("u\u0308nï中.mp4", r"ünï\u4e2d.mp4"), ("смесь\n", r"смесь\n")):
        drawn, font = check.drawable(text, 13)
        assert (drawn, font.getname()) == (shown, system.getname())


def test_index_names_bad_files_and_fails_when_all_are_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "empty.mp4").touch()
    output = tmp_path / "i.tvi"
    assert run("index", data, "--output", output, "--workers", 0) == 1
    assert "empty.mp4: the file is empty" in capsys.readouterr().out
    bad_list = tmp_path / "i.tvi.bad_files.jsonl"
    assert json.loads(bad_list.read_text()) == {"path": "empty.mp4", "reason": "the file is empty"}
    write_video(data / "empty.mp4")
    assert run("index", data, "--output", output, "--workers", 0) == 0
    assert not bad_list.exists(), "a fixed data set leaves no old list behind"


def test_mistakes_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="does not exist"):
        run("check", tmp_path / "none")
    with pytest.raises(UserError, match="--workers: '-1' is not a whole number, at least 0"):
        run("index", folder, "--output", tmp_path / "i", "--workers", -1)
    with pytest.raises(UserError, match="'480' is not a size: write HEIGHTxWIDTH"):
        run("check", folder, "--size", 480)
    with pytest.raises(UserError, match="--samples: '0' is not a whole number, at least 1"):
        run("check", folder, "--samples", 0)
    with pytest.raises(MissingFileError, match="data_root"):
        run("index", folder, "--output", tmp_path / "i", "--data_root", tmp_path / "none")
    escape = tmp_path / "list.json"
    escape.write_text(json.dumps({"total": 1, "list": [{"path": "../v0.mp4"}]}))
    with pytest.raises(UserError, match="leaves the data root"):
        run("index", escape, "--output", tmp_path / "i")
    assert not (tmp_path / "i").exists()


def test_a_full_disk_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "i.tvi.new-text").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"writing to .* failed \(No space left on device.*check its space"):
        run("index", folder, "--output", tmp_path / "i.tvi", "--workers", 0)


def test_sample_clips_can_be_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clips = tmp_path / "clips"
    assert run("sample", clips, "--count", 6, "--frames", 9, "--size", "64x96") == 0
    assert "wrote 6 clips" in capsys.readouterr().out
    words = ("--size", "64x96", "--frames", 9, "--workers", 0)
    assert run("check", clips / "annotations.json", *words, "--contact_sheet", tmp_path / "s.png") == 0
    assert "6 good, 0 bad" in capsys.readouterr().out


def test_old_names_of_options_work_and_say_the_new_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", tmp_path, "--count", 2, "--frames", 9, "--height", 64, "--width", 96) == 0
    words = ("check", tmp_path, "--size", "64x96", "--n_frames", 9, "--num_workers", 0, "--train_split", 0.5)
    assert run(*words, "--contact_sheet", tmp_path / "s.png") == 0
    printed = capsys.readouterr()
    assert "clips of 9 frames" in printed.out and "96x64 (width x height)" in printed.out
    said = [line.split(";")[0] for line in printed.err.splitlines() if "is called" in line]
    assert said == [
        "--height is called --size HxW now",
        "--width is called --size HxW now",
        "--n_frames is called --frames now",
        "--num_workers is called --workers now",
    ]


def test_a_clip_length_is_held_against_the_frame_rule(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("check", folder, "--contact_sheet", tmp_path / "s.png", "--samples", 1, "--workers", 0, "--frames")
    assert run(*words, 19) == 1
    assert "NOT USABLE as asked: n_frames=19 suits no variant" in capsys.readouterr().out
    assert run(*words, 19, "--variant", "taehv") == 1
    assert "n_frames=19 does not suit taehv" in capsys.readouterr().out
    assert run(*words, 12) == 0
    assert (
        "12 frames suit every variant but taecvx, taeltx_2, taeltx2_3, taeltx2_3_wide, taeh3\n"
        in capsys.readouterr().out
    )
    assert run(*words, 12, "--variant", "taehv") == 0
    assert "  12 frames suit taehv\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="there is no variant 'taehx'"):
        run(*words, 12, "--variant", "taehx")

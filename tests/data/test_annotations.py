"""Reading what is in a data set: every source format, in constant memory, and never out of the data root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import pytest

from tinyvae.data import annotations
from tinyvae.data.annotations import VideoEntry, iterate_entries
from tinyvae.errors import MissingFileError, UserError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def read(source: Path, **options: Path) -> list[VideoEntry]:
    return list(iterate_entries(source, **options))


def test_folder_tree_takes_videos_by_suffix_and_leaves_hidden_and_other_files(tmp_path: Path) -> None:
    for name in ("b.mp4", "a.MKV", "sub/deep/c.webm", "sub/notes.txt", ".hidden/d.mp4", "._b.mp4", "sub/ü ø.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [entry.path for entry in read(tmp_path)] == ["a.MKV", "b.mp4", "sub/ü ø.mp4", "sub/deep/c.webm"]


def test_links_to_folders_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "v.mp4").touch()
    (root / "one").symlink_to(outside)
    (root / "two").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (outside / "up").symlink_to(tmp_path)
    assert [entry.path for entry in read(root)] == ["one/v.mp4"]


def test_a_root_that_is_a_link_to_a_folder_above_it_is_taken_as_it_is_named(tmp_path: Path) -> None:
    """Two ways to write each path, and always the same one: it decides over training or validation."""
    (tmp_path / "a.mp4").touch()
    (tmp_path / "here").symlink_to(".")
    assert [entry.path for entry in read(tmp_path / "here", data_root=tmp_path / "here")] == ["a.mp4"]


def test_a_link_out_of_the_source_is_followed_also_where_it_stays_in_the_root(tmp_path: Path) -> None:
    """As in a folder of links to a pool, with the data root above both."""
    (tmp_path / "pool" / "x").mkdir(parents=True)
    (tmp_path / "pool" / "x" / "v.mp4").touch()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "link").symlink_to(tmp_path / "pool" / "x")
    assert [entry.path for entry in read(tmp_path / "train", data_root=tmp_path)] == ["train/link/v.mp4"]


@pytest.mark.parametrize(("targets", "path"), [(("", "sub"), "a/sub/v.mp4"), (("sub", ""), "a/v.mp4")])
def test_a_folder_that_two_links_reach_is_listed_once(tmp_path: Path, targets: tuple[str, str], path: str) -> None:
    """Else the hash could put one film into training and, under its other name, into validation."""
    (tmp_path / "outside" / "sub").mkdir(parents=True)
    (tmp_path / "outside" / "sub" / "v.mp4").touch()
    (tmp_path / "root").mkdir()
    for name, target in zip(("a", "b"), targets, strict=True):
        (tmp_path / "root" / name).symlink_to(tmp_path / "outside" / target)
    assert [entry.path for entry in read(tmp_path / "root")] == [path]


def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    (tmp_path / "me").symlink_to("me")
    (tmp_path / "nowhere").symlink_to("gone")
    assert [entry.path for entry in read(tmp_path)] == ["a.mp4"]


def test_annotation_json_with_path_full_path_and_split(tmp_path: Path) -> None:
    records = [
        {"path": "x/a.mp4", "split": "train", "caption": "a [b] {c}"},
        {"full_path": str(tmp_path / "b.mp4"), "split": "validation"},
        {"path": None, "full_path": "./x/../c.mp4"},
        {"path": "d.mp4", "full_path": "/elsewhere/d.mp4", "split": "test"},
    ]
    source = write(tmp_path / "a.json", json.dumps({"total": 4, "info": {"list": [1]}, "list": records, "end": None}))
    expected = [("x/a.mp4", "train"), ("b.mp4", "val"), ("c.mp4", ""), ("d.mp4", "test")]
    assert [(entry.path, entry.split) for entry in read(source)] == expected


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_total_that_is_not_that_of_the_list_is_said_once(tmp_path: Path, place: str) -> None:
    records = [{"path": f"{number}.mp4"} for number in range(6)]
    content = {"total": 99, "list": records} if place == "before" else {"list": records, "total": 99}
    source = write(tmp_path / "a.json", json.dumps(content))
    code = "import sys; from pathlib import Path; from tinyvae.data.annotations import iterate_entries\n"
    code += "for _ in range(3): assert len(list(iterate_entries(Path(sys.argv[1])))) == 6"
    done = subprocess.run([sys.executable, "-c", code, str(source)], capture_output=True, text=True, check=True)
    assert done.stderr.count("says 'total': 99, and its list has 6 entries") == 1
    with warnings.catch_warnings(action="error"):
        for right in ({"total": 6, "list": records}, {"list": records}, records):
            assert len(read(write(tmp_path / "b.json", json.dumps(right)))) == 6


@pytest.mark.parametrize("buffer_chars", [1, 2, 3, 7, 64])
def test_json_is_the_same_whatever_the_read_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_chars: int
) -> None:
    monkeypatch.setattr(annotations, "READ_CHARS", buffer_chars)
    text = '\ufeff {"size": 1234, "n": 1.5e3, "list": [ {"path": "ü\\u00e9 \\"q\\".mp4"} ,\n{"path":"b"}], "z": true}\n'
    source = write(tmp_path / "a.json", text)
    assert [entry.path for entry in read(source)] == ['üé "q".mp4', "b"]


def test_bare_list_and_jsonl_give_the_same(tmp_path: Path) -> None:
    records = [{"path": f"{n}.mp4"} for n in range(3)]
    bare = write(tmp_path / "a.json", json.dumps(records))
    lines = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)) + "\n\n")
    assert read(bare) == read(lines) == [VideoEntry(path=f"{n}.mp4") for n in range(3)]


@pytest.mark.parametrize(
    "path", ["../out.mp4", "a/../../out.mp4", "/etc/passwd", "..", ".", "a/..", "x\0.mp4", "\ud800"]
)
def test_a_path_that_leaves_the_root_or_names_no_file_is_refused(tmp_path: Path, path: str) -> None:
    source = write(tmp_path / "a.jsonl", json.dumps({"path": "good.mp4"}) + "\n" + json.dumps({"path": path}) + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 2"):
        read(source)


def test_data_root_can_be_another_folder_and_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    source = write(tmp_path / "a.json", json.dumps([{"full_path": str(tmp_path / "real" / "v.mp4")}]))
    assert read(source, data_root=tmp_path / "link") == [VideoEntry(path="v.mp4")]
    with pytest.raises(UserError, match="leaves the data root"):
        read(source, data_root=tmp_path / "rea")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"total": 1}', "has no 'list'"),
        ('{"list": {"path": "a"}}', "must hold a list"),
        ('{"list": [{"path": "a"}', "cut off|closing"),
        ('{"list": [{"path": "a"} {"path": "b"}]}', "comma"),
        ('{"list": [{"path": "a"}]} x', "after its end"),
        ('{"list": ["a.mp4"]}', "entry 1.*object"),
        ('{"list": [{"name": "a"}]}', "entry 1.*no 'path'"),
        ('{"list": [{"path": 3}]}', "no 'path'"),
        ('{"list": [{"path": "a", "split": "tain"}]}', "split 'tain'"),
        ('{"list": [{"path": "a", "split": 1}]}', "split 1"),
        ("", "must start"),
        ("hello", "must start"),
        ('{"list": [{"path": "a", "n": ' + "1" * 5000 + "}]}", "not valid JSON"),
        ('{"list": [' + "[" * 100_000, "not valid JSON"),
    ],
)
def test_broken_annotation_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(write(tmp_path / "a.json", text))


def test_other_mistakes_in_the_source_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="does not exist"):
        read(tmp_path / "nothing")
    with pytest.raises(UserError, match="cannot tell what"):
        read(write(tmp_path / "a.txt", "a.mp4"))
    with pytest.raises(UserError, match=r"line 1.*not JSON"):
        read(write(tmp_path / "a.jsonl", "{broken\n"))
    with pytest.raises(UserError, match=r"line 1.*not JSON"):
        read(write(tmp_path / "a.jsonl", "[" * 100_000))
    (tmp_path / "c.jsonl").symlink_to("/proc/self/mem")  # it can be opened, and not read
    with pytest.raises(UserError, match=r"c\.jsonl cannot be read \(Input/output error\)"):
        read(tmp_path / "c.jsonl")
    (tmp_path / "b.json").write_bytes(b'{"list": [{"path": "\xff\xfe"}]}')
    with pytest.raises(UserError, match="UTF-8"):
        read(tmp_path / "b.json")


def test_a_long_annotation_file_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "READ_CHARS", 1 << 14)
    records = [{"path": f"folder/{number}.mp4", "caption": "word " * 40} for number in range(5000)]
    source = write(tmp_path / "long.json", json.dumps({"total": 5000, "list": records}))
    assert os.path.getsize(source) > 1 << 20
    tracemalloc.start()
    count = sum(1 for _ in iterate_entries(source))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 5000
    assert peak < 10 << 14, "one read buffer and one entry at a time"

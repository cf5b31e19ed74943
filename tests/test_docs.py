"""The documents name things that exist: anchors, files, verbs, flags, presets; and both languages say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.documents import DOCUMENTS, FENCE, INLINE_CODE, ROOT, commands, flags_in, flags_of_verb, without_code
from tinyvae.cli.main import TAKE_SETTINGS, VERBS, build_parser
from tinyvae.config.load import preset_names
from tinyvae.config.old_files import ALIASES
from tinyvae.config.schema import FIELDS

TRANSLATED = [path for path in DOCUMENTS if path.with_suffix("").suffix == ".zh-CN"]
RUN_PAGES = [path for path in DOCUMENTS if path.name.startswith(("guide-", "troubleshooting"))]
OVERVIEWS = [path for path in DOCUMENTS if path.name.startswith("README")]
FORBIDDEN_PACKAGES = ("torchvision", "lpips", "decord", "opencv")

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OWN_ANCHOR = re.compile(r'<a id="([^"]+)"></a>\n#{1,6} ')
LAUNCHER_OPTIONS = {"debug", "profile", "help"}


def headings(text: str) -> list[str]:
    return re.findall(r"^#{1,6} +(.+?) *#*$", without_code(text), re.MULTILINE)


def github_anchor(heading: str) -> str:
    """GitHub's rule: the shown text in lower case, without punctuation, with - for spaces."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """The anchors of a document: those of its headings, and those that stand right above one."""
    text = path.read_text()
    found: set[str] = set(OWN_ANCHOR.findall(text))
    for anchor in map(github_anchor, headings(text)):
        number = 1
        unique = anchor
        while unique in found:
            unique = f"{anchor}-{number}"
            number += 1
        found.add(unique)
    return found


def code_that_names_documents() -> list[Path]:
    files = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.sh"), *(ROOT / "slurm").iterdir()]
    return [*files, *(ROOT / "accelerate_configs").glob("*.yaml"), ROOT / "environment.yml"]


def named_in_code() -> list[tuple[str, str]]:
    """(document, anchor or "") wherever code, a launcher or a launch file names a document."""
    pattern = re.compile(r"(docs/[\w.-]+?\.md)(?:#([\w-]+))?")
    named = {match for file in code_that_names_documents() for match in pattern.findall(file.read_text())}
    return sorted(named)


def test_the_anchor_rule() -> None:
    assert github_anchor("A lost process") == "a-lost-process"
    assert github_anchor("4. Checklist before") == "4-checklist-before"
    assert github_anchor("`nccl_timeout`, and why") == "nccl_timeout-and-why"
    assert github_anchor("Where the sources disagree, and what we chose") == (
        "where-the-sources-disagree-and-what-we-chose"
    )


def test_messages_name_sections_that_exist() -> None:
    named = named_in_code()
    assert ("docs/troubleshooting.md", "a-lost-process") in named, "the search finds what is known to be there"
    for document, anchor in named:
        for path in (ROOT / document, (ROOT / document).with_suffix(".zh-CN.md")):
            if path.suffixes == [".zh-CN", ".md"] and not path.exists():
                continue  # not every document has a translation
            assert path.is_file(), f"code names {document}, which is not there"
            assert not anchor or anchor in anchors(path), (
                f"code names {document}#{anchor}; {path.name} has no such section"
            )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(without_code(path.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        aim = (path.parent / file).resolve() if file else path
        assert aim.exists(), f"{path.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(aim), f"{path.name} links to {target}: no such section"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_of_the_repository_exist(path: Path) -> None:
    """A path in code style that starts in one of our folders is there."""
    ours = re.compile(r"^(?:src|docs|tests|benchmarks|examples|slurm|accelerate_configs)/[\w./-]+$")
    for code in INLINE_CODE.findall(without_code(path.read_text())):
        if ours.match(code):
            assert (ROOT / code).exists(), f"{path.name} names `{code}`"


@pytest.mark.parametrize("path", TRANSLATED, ids=lambda path: path.name)
def test_both_languages_have_the_same_parts(path: Path) -> None:
    original = path.with_name(path.name.replace(".zh-CN", ""))
    ours, theirs = path.read_text(), original.read_text()
    if path not in OVERVIEWS:
        assert OWN_ANCHOR.findall(ours) == [github_anchor(heading) for heading in headings(theirs)]
    levels = [re.findall(r"^(#{1,6}) ", without_code(text), re.MULTILINE) for text in (ours, theirs)]
    assert levels[0] == levels[1]
    bare = [
        [re.sub(r" *(?<!\S)#.*", "", line).rstrip() for _, body in FENCE.findall(text) for line in body.splitlines()]
        for text in (ours, theirs)
    ]
    assert bare[0] == bare[1], "code blocks differ in more than their comments"
    for kind in (r"^- \[ \]", r"^\|"):
        assert len(re.findall(kind, ours, re.MULTILINE)) == len(re.findall(kind, theirs, re.MULTILINE)), kind
    flags = [set(re.findall(r"--[a-z_]{3,}", text)) for text in (ours, theirs)]
    assert flags[0] ^ flags[1] <= {"--config_file"}


def test_every_translation_is_of_something() -> None:
    names = {path.name for path in TRANSLATED}
    assert {"README.zh-CN.md", "troubleshooting.zh-CN.md", "guide-training.zh-CN.md"} <= names
    for path in TRANSLATED:
        assert path.with_name(path.name.replace(".zh-CN", "")).is_file()


CALL = re.compile(r"(?:^|&& )tinyvae ([a-z][\w-]*)(.*)|-m tinyvae\.cli ([a-z][\w-]*)(.*)")
LAUNCH = re.compile(r"(?:train_taehv(?:_h100)?|auto_recovery_train)\.sh\b(.*)")


def calls(path: Path) -> list[tuple[str, str]]:
    """(verb, the words behind it) of every `tinyvae VERB ...` that a document shows."""
    found = [CALL.search(command.strip()) for command in commands(path)]
    return [(call[1] or call[3], call[2] or call[4] or "") for call in found if call]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_verbs_exist(path: Path) -> None:
    for verb, words in calls(path):
        assert verb in VERBS, f"{path.name}: `tinyvae {verb}{words}`"


def is_setting(flag: str) -> bool:
    return ALIASES.get(flag, flag) in FIELDS or (flag.startswith("no_") and flag[3:] in FIELDS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_flags_exist(path: Path) -> None:
    """Flags of `train` and of the launchers are settings; `check` and `latents` have more; other verbs their own."""
    for verb, words in calls(path):
        flags = flags_in(words) - {"help"}
        if verb in TAKE_SETTINGS:
            own = flags_of_verb(build_parser(verb))
            wrong = {flag for flag in flags if not is_setting(flag) and flag not in own}
        else:
            wrong = flags - flags_of_verb(build_parser(verb)) if flags else set()
        assert not wrong, f"{path.name}: `tinyvae {verb}{words}` has {wrong}"
    for command in commands(path):
        launch = LAUNCH.search(command)
        if launch:
            wrong = {flag for flag in flags_in(launch[1]) - LAUNCHER_OPTIONS if not is_setting(flag)}
            assert not wrong, f"{path.name}: `{command.strip()}` has {wrong}"


@pytest.mark.parametrize("path", RUN_PAGES, ids=lambda path: path.name)
def test_lone_flags_are_settings(path: Path) -> None:
    """`--key value` alone in a sentence, in the pages that are about runs, is a setting of the run."""
    seen = 0
    for code in INLINE_CODE.findall(without_code(path.read_text())):
        if code.startswith("--") and code != "--key value":
            wrong = {flag for flag in flags_in(code) - LAUNCHER_OPTIONS if not is_setting(flag)}
            assert not wrong, f"{path.name}: `{code}`"
            seen += 1
    assert seen, "the search finds flags"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_presets_exist(path: Path) -> None:
    placeholders = re.compile(r"[A-Z_./]|\.py$|^-|^\.|/|^$")
    for command in commands(path):
        patterns = (r"tinyvae(?:\.cli)? (?:train|check) +(\S+)", r"--preset +(\S+)", r"_(?:h100|train)\.sh +\d+ +(\S+)")
        for pattern in patterns:
            for name in re.findall(pattern, command):
                name = name.rstrip(".,;)`")
                known = name in preset_names() or name in ("custom", "...")
                assert known or placeholders.search(name), f"{path.name}: `{command.strip()}` names the preset {name}"


def test_the_table_of_presets_is_right() -> None:
    """The numbers in the guide for H100 and A800 are those of the presets."""
    from tinyvae.config import load_preset

    for path in sorted((ROOT / "docs").glob("guide-h100-a800*.md")):
        row = re.compile(
            r"^\| `(\w+)` \| (\d+)x(\d+) \| (\d+) \| (\d+) x (\d+) x (\d+) = (\d+) "
            r"\| ([\d,]+) \| (\S+) \| ([\d,]+) \|$",
            re.MULTILINE,
        )
        rows = row.findall(path.read_text())
        assert {name for name, *_ in rows} == {"test", "1gpu_h100", "h100", "a800", "16gpu_h100"}
        for name, *cells in rows:
            preset = load_preset(name)
            width, height, frames, batch, accumulation, gpus, clips, steps, rate, every = cells
            shown = [int(cell.replace(",", "")) for cell in (width, height, frames, batch, accumulation, steps, every)]
            wanted = [preset.width, preset.height, preset.n_frames, preset.train_batch_size]
            wanted += [preset.gradient_accumulation_steps, preset.max_train_steps, preset.checkpointing_steps]
            assert shown == wanted, f"{path.name}: {name}"
            assert float(rate) == preset.learning_rate
            assert int(clips) == int(batch) * int(accumulation) * int(gpus)


def test_the_sixteen_failures_are_all_there() -> None:
    for path in (ROOT / "docs" / "troubleshooting.md", ROOT / "docs" / "troubleshooting.zh-CN.md"):
        table = re.findall(r"^\| ([\d, 、]+) \| .*\(#", path.read_text(), re.MULTILINE)
        assert {int(number) for cell in table for number in re.findall(r"\d+", cell)} == set(range(1, 17))


def test_both_readmes_have_the_two_command_lines() -> None:
    lines = [re.findall(r"^python3 -m venv .*$", path.read_text(), re.MULTILINE) for path in OVERVIEWS]
    assert len(lines) == 2 and lines[0] == lines[1] and len(lines[0]) == 2


def supported_pythons() -> list[int]:
    """The minor versions of Python 3 that pyproject.toml names."""
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    return sorted(map(int, named))


@pytest.mark.parametrize("path", OVERVIEWS, ids=lambda path: path.name)
def test_both_readmes_name_every_python(path: Path) -> None:
    assert supported_pythons() and all(f"3.{minor}" in path.read_text() for minor in supported_pythons())


def test_conda_environment() -> None:
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert content["name"] == "tiny-vae"
    wanted = content["dependencies"]
    pip_part = next(entry for entry in wanted if isinstance(entry, dict))["pip"]
    pythons = supported_pythons()
    assert f"python>=3.{pythons[0]},<3.{pythons[-1] + 1}" in wanted and "pip" in wanted and "-e ." in pip_part
    named = " ".join(entry for entry in [*wanted, *pip_part] if isinstance(entry, str))
    for package in FORBIDDEN_PACKAGES:
        assert package not in named
    assert "://" not in (ROOT / "environment.yml").read_text(), "no registry is named"

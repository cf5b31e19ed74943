"""What the documents name is there: settings, presets, files, modules, variables, log lines; and commands can start."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, FENCE, INLINE_CODE, ROOT, commands, flags_in, flags_of_verb, without_code
from tinyvae import VARIANTS
from tinyvae.cli.main import build_parser
from tinyvae.config import load_config
from tinyvae.config.load import preset_names
from tinyvae.config.old_files import ALIASES, CHECKED_KEYS, OLD_KEYS
from tinyvae.config.schema import FIELDS
from tinyvae.training import deepspeed as launch_config

NOT_FOR_USERS = ("architecture.md", "CHANGELOG.md", "CONTRIBUTING.md", "decisions.md", "performance.md")
USER_PAGES = [page for page in DOCUMENTS if page.name not in NOT_FOR_USERS]
NO_SETTINGS = ("models.md", "evaluation.md", "diffusers.md", "export.md")
ABOUT_SETTINGS = [page for page in USER_PAGES if page.name not in NO_SETTINGS]
MIGRATION = [ROOT / "docs" / name for name in ("migration.md", "migration.zh-CN.md")]

LAUNCH_KEYS = {*launch_config.PASSED, *launch_config.NOT_PASSED, *launch_config.ONLY_AT}
LAUNCH_KEYS |= {"deepspeed_config", "enable_cpu_affinity", "num_processes", "num_machines"}  # accelerate's own
LAUNCH_KEYS |= {*launch_config.Zero.model_fields, *launch_config.DeepSpeedSettings.model_fields}
NO_SETTINGS = {
    *("load_model", "encode_video", "check_teacher", "make_train_loader", "open_or_build_index", "full_path"),
    *("best_model", "best_score", "best_step", "early_stop", "size_independent", "cosine_with_restarts"),
    *("seraena_correction_std", "invert_scale_latents", "decoder_psnr", "latent_snr"),
}
"""Names with an underscore in the documents that are functions, values or metrics of ours or of others."""
OLD_NAMES = {
    *("get_ref_vae", "state_dict", "reconstruction_loss", "round_robin_gradients", "elastic_checkpoint"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"),
    *("sparse_gradients", "cpu_offload", "stage3_gather_16bit_weights_on_model_save", "model_type"),
}
"""Names of the old trainer and of its launch files, which the documents say are gone."""


@pytest.mark.parametrize("page", ABOUT_SETTINGS, ids=lambda page: page.name)
def test_settings_exist(page: Path) -> None:
    """A lone `word_with_underscore`, or `word = value`, is a setting unless it is known to be something else."""
    name = re.compile(r"(?:args\.)?([a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?: ?[=:] ?[\w.'\"-]+)?")
    known = {
        *FIELDS,
        *ALIASES,
        *OLD_KEYS,
        *CHECKED_KEYS,
        *LAUNCH_KEYS,
        *preset_names(),
        *VARIANTS,
        *NO_SETTINGS,
        *OLD_NAMES,
    }
    for code in INLINE_CODE.findall(without_code(page.read_text())):
        match = name.fullmatch(code)
        assert not match or match[1] in known, f"{page.name} names `{code}`: no setting, nor in the lists of this test"


def test_the_lists_of_this_test_are_needed() -> None:
    text = "".join(page.read_text() for page in ABOUT_SETTINGS)
    assert not {word for word in NO_SETTINGS | OLD_NAMES if f"`{word}`" not in text}


def test_the_tables_of_presets_are_whole() -> None:
    """Configuration and both migration guides name every preset, and none that is gone."""
    configuration = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", configuration.split("## Presets")[1].split("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == preset_names()
    for guide in MIGRATION:
        table = guide.read_text().split('"settings-files-and-presets"')[-1].split("## Settings files and presets")[-1]
        cells = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|$", table.split("\n\n")[1], re.MULTILINE)
        assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted([*preset_names(), "h100"]), guide.name


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_files_in_commands_exist(page: Path) -> None:
    """Of this repository: in its folders, and the scripts at its root."""
    ours = re.compile(
        r"(?<![\w/.-])(?:\./)?((?:examples|benchmarks|accelerate_configs|slurm|tests)/[\w./-]+"
        r"|(?:train_taehv|train_taehv_h100|auto_recovery_train)\.sh|inference\.py|environment\.yml|pyproject\.toml)\b"
    )
    for block in (body for kind, body in FENCE.findall(page.read_text()) if kind in ("bash", "")):
        for file in ours.findall(block):
            assert (ROOT / file).exists(), f"{page.name} names {file}"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_modules_and_actions_exist(page: Path) -> None:
    data = flags_of_actions("data")
    for command in commands(page):
        for module in re.findall(r"python -m (tinyvae[\w.]*)", command):
            found = importlib.util.find_spec(module)
            is_folder = found is not None and found.submodule_search_locations is not None
            assert importlib.util.find_spec(f"{module}.__main__") if is_folder else found, f"{page.name}: -m {module}"
        for action, words in re.findall(r"\btinyvae data ([a-z]+)\b(.*)", command):
            assert action in data, f"{page.name}: `tinyvae data {action}`"
            assert flags_in(words) <= data[action] | {"help"}, f"{page.name}: `{command.strip()}`"


def flags_of_actions(verb: str) -> dict[str, set[str]]:
    parsers = next(action.choices for action in build_parser(verb)._actions if hasattr(action, "add_parser"))
    assert parsers is not None
    return {name: flags_of_verb(parser) for name, parser in dict(parsers).items()}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_options_of_inference_exist(page: Path) -> None:
    known = set(re.findall(r'add_argument\("--(\w+)"', (ROOT / "inference.py").read_text()))
    for command in commands(page):
        for words in re.findall(r"python inference\.py (.*)", command):
            assert flags_in(words) <= known, f"{page.name}: `{command.strip()}`"


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_commands_that_need_data_name_it(page: Path) -> None:
    """Only quickstart has clips of its own; a line without data can be typed and cannot start."""
    typed = [body.replace("\\\n", " ") for kind, body in FENCE.findall(page.read_text()) if kind == "bash"]
    for line in (line for block in typed for line in block.splitlines()):
        launched = re.search(r"(?:\.sh \d+|(?:tinyvae|-m tinyvae\.cli) (?:train|check)) (\S+)", line)
        if launched and launched[1] in preset_names() and launched[1] != "quickstart":
            named = flags_in(line) & {"data_root", "index_path", "annotation_file"}
            assert named, f"{page.name}: `{line.strip()}` names no data"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_variables_of_ours_are_read_or_set(page: Path) -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("conftest.py"), *ROOT.glob("*.sh")]
    sources += [ROOT / "tests" / "evaluation" / "browser.py"]
    code = "".join(file.read_text() for file in sources)
    for variable in set(re.findall(r"\bTINYVAE_[A-Z_]+\b", page.read_text())):
        assert re.search(rf"\b{variable}\b", code), f"{page.name} names {variable}"


def test_settings_files_in_the_documents_load(tmp_path: Path) -> None:
    blocks = [
        body for kind, body in FENCE.findall((ROOT / "docs" / "configuration.md").read_text()) if kind == "python"
    ]
    assert len(blocks) == 2
    for number, body in enumerate(blocks):
        file = tmp_path / f"block_{number}.py"
        file.write_text(body)
        assert load_config(file).config.data_root == tmp_path / "data" / "videos"


LOG_LINES = (
    *("files train, ", "validation at step ", "stopping early: no better ", "COULD NOT SAVE ", "resumed from "),
    *("skipped: a loss or gradient was not finite", "ran out of memory at step ", "going on with micro-batches in "),
    *("final model: ", "saved "),
)


@pytest.mark.parametrize("words", LOG_LINES)
def test_log_lines_that_scripts_look_for_are_written(words: str) -> None:
    """The migration guides promise these words; who changes a log line changes them too."""
    code = "".join(file.read_text() for file in (ROOT / "src" / "tinyvae" / "training").glob("*.py"))
    assert f'"{words}' in code or f"d {words}" in code, words
    for guide in MIGRATION:
        assert words.strip() in guide.read_text(), f"{guide.name}: {words}"


QUOTED = (
    *("does not suit ", "does not divide the ", "Did you mean ", "could not exchange ", "skipped: a loss or gradient"),
    *(
        "out of memory with a single clip of ",
        "Earlier checkpoints are untouched; the ",
        "belongs to a run with other ",
    ),
    *("a process that loads clips was killed", "another run writes to ", "already holds ", "no file of "),
    *("the released weights are published in ", "needs LPIPS weights", "GPUs were asked for and "),
)


@pytest.mark.parametrize("words", QUOTED)
def test_messages_that_troubleshooting_quotes_are_in_the_code(words: str) -> None:
    files = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.sh")]
    code = " ".join("".join(file.read_text() for file in files).split()).replace('" "', "").replace('" f"', "")
    assert words.strip() in code
    for name in ("troubleshooting.md", "troubleshooting.zh-CN.md"):
        assert words.strip() in (ROOT / "docs" / name).read_text(), f"{name}: {words}"

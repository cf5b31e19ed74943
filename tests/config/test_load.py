"""Settings files, presets by name, overrides, old keys, where paths start from, and the JSON of a run."""

from __future__ import annotations

import builtins
import datetime
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyvae import TAEHV, save_model
from tinyvae.cli import main as cli
from tinyvae.config.load import load_config, parse_words, project_of
from tinyvae.config.old_files import OLD_KEYS
from tinyvae.config.rules import check_config
from tinyvae.config.schema import FIELDS, TrainConfig, kinds_of, to_json
from tinyvae.errors import MissingFileError, UserError
from tinyvae.storage import Url
from tinyvae.training.run_folder import earlier_run_folders, has_time, new_run_folder

DOCS = Path(__file__).resolve().parents[2] / "docs"

OLD_STYLE = (Path(__file__).parent / "old_settings" / "taehv_config_h100_fixed.py").read_text()


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(text)
    return file


def refusal(file: str | Path, overrides: Any = ()) -> str:
    with pytest.raises(UserError) as caught:
        load_config(file, overrides)
    return str(caught.value)


# users' files


@pytest.mark.parametrize("with_easydict", [True, False])
def test_a_users_old_file_works(tmp_path: Path, with_easydict: bool) -> None:
    text = OLD_STYLE if with_easydict else OLD_STYLE.replace("args = EasyDict()", "").replace("from easydict", "# from")
    text += "args.max_train_steps = 1e3\nargs.lr_warmup_steps = args.max_train_steps // 10\n"
    text += "args.gradient_accumulation_steps = 2 * 8\nargs.metric_for_best_model = 'reconstruction_loss'\n"
    (tmp_path / "setup.py").touch()
    config = load_config(write(tmp_path / "configs", text)).config
    assert (config.height, config.width, config.n_frames) == (480, 720, 16)
    assert config.pretrained_model_path == tmp_path / "checkpoints" / "taecvx.pth"
    assert config.data_root == tmp_path / "data" / "videos"
    assert config.color_jitter_params == (0.15, 0.15, 0.15, 0.08)
    assert config.gradient_accumulation_steps == 16
    assert config.max_train_steps == 1000
    assert config.lr_warmup_steps == 100
    assert config.output_dir == tmp_path / "output" / "%Y-%m-%d_%H-%M-%S"
    assert config.metric_for_best_model == "mse"
    assert config.variant == "taecvx", "nothing states it, but the teacher is a CogVideoX"
    assert (config.ref_vae_path, config.ref_vae_type) == (str(tmp_path / "CogVideoX-2b"), "cogvideox")


def test_a_precision_may_be_that_of_torch(tmp_path: Path) -> None:
    lines = (
        "import torch",
        'args.device_type = "cuda" if torch.cuda.is_available() else "cpu"',
        "args.mixed_precision = torch.bfloat16",
        "args.ref_vae_dtype = torch.half",
    )
    loaded = load_config(write(tmp_path, "\n".join(lines)))
    assert (loaded.config.mixed_precision, loaded.config.ref_vae_dtype) == ("bf16", "float16")
    assert [notice.split()[0] for notice in loaded.notices] == ["device_type"]


def test_each_old_key_gets_one_line(tmp_path: Path) -> None:
    assert not set(OLD_KEYS) & set(FIELDS)
    lines = "".join(f"args.{key} = True\n" for key in (*OLD_KEYS, *OLD_KEYS))
    notices = load_config(write(tmp_path, lines)).notices
    assert [notice.partition(" is not a setting any more: ")[0] for notice in notices] == list(OLD_KEYS)
    assert not any("\n" in notice for notice in notices)


def test_old_keys_that_disagree_with_the_variant_are_refused(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, "args.variant = 'taew2_2'\nargs.patch_size = 1\nargs.latent_channels = 16\n"))
    assert "patch_size=1" in text and "line 2" in text and "whose patch_size is 2" in text
    assert "whose latent_channels is 48" in text


def test_unknown_keys_all_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, "args.hieght = 480\nargs.learning_rat = 1e-4\nargs.zzz = 1\nargs.beta1 = 3\n"))
    assert "4 mistakes" in text
    assert "'hieght'" in text and "line 1" in text and "Did you mean 'height'?" in text
    assert "Did you mean 'learning_rate'?" in text
    assert "there is no setting 'zzz'" in text
    assert "beta1=3" in text


def test_a_wrong_type_in_a_file_names_its_line(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, "\nargs.n_frames = 'many'\n"))
    assert "n_frames='many' must be a whole number" in text and "line 2" in text


@pytest.mark.parametrize("key", [key for key in FIELDS if {str, Path} & set(kinds_of(key))])
def test_no_text_or_path_may_hold_a_nul_byte(tmp_path: Path, key: str) -> None:
    text = refusal(write(tmp_path, f"\nargs.{key} = 'a\\0b'\n"))
    assert rf"{key}='a\x00b' holds a NUL byte" in text and "line 2" in text
    config = TrainConfig(**{key: "a\0b"})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"{key}='a\\x00b' holds a NUL byte; leave it out"):
        check_config(config)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("args.seed = sum(i for i in range(5)) + 1", ("seed", 11)),
        ("args.seed = 4\nargs.seed += 2", ("seed", 6)),
        ("args['seed'] = 5", ("seed", 5)),
        ("from easydict import EasyDict as edict\nargs: object = edict(seed=9)", ("seed", 9)),
        ("import easydict\nargs = easydict.EasyDict({'seed': 9})", ("seed", 9)),
        ("from types import SimpleNamespace\nargs = SimpleNamespace(seed=3)", ("seed", 3)),
        ("import argparse\nargs = argparse.Namespace(seed=3)", ("seed", 3)),
        ("args = dict(seed=3)", ("seed", 3)),
        ("class args:\n    seed = 3", ("seed", 3)),
        ("args.lr_warmup_steps = args.max_train_steps // 100", ("lr_warmup_steps", 100)),
        ("args.tracker_name = f'run_{7:03d}'", ("tracker_name", "run_007")),
        ("args.gaussian_blur_sigma = [0.5, 1]", ("gaussian_blur_sigma", (0.5, 1.0))),
        ("args.n_frames = '16'", ("n_frames", 16)),
        ("args.ref_vae_path = ''", ("ref_vae_path", None)),
        ("from pathlib import Path\nargs.data_root = Path('a') / 'b'", ("data_root", "a/b")),
        ("from pathlib import Path\nargs.data_root = Path(__file__).parent / 'b'", ("data_root", "b")),
        ("import os.path as osp\nargs.data_root = osp.join(osp.dirname(__file__), '..', 'b')", ("data_root", "../b")),
        ("import os\nargs.data_root = os.path.abspath('b')", ("data_root", "b")),
        ("from datetime import datetime\nargs.output_dir = f'out/{datetime.now():%Y%m}'", ("output_dir", "out/%Y%m")),
        ("import datetime as dt\nargs.output_dir = dt.date.today().strftime('out/%d')", ("output_dir", "out/%d")),
        ("import time\nargs.output_dir = 'out/' + time.strftime('%H%M', time.localtime())", ("output_dir", "out/%H%M")),
    ],
)
def test_what_a_file_may_write(tmp_path: Path, line: str, expected: tuple[str, Any]) -> None:
    key, value = expected
    if key in ("data_root", "output_dir"):
        value = Path(os.path.normpath(tmp_path / value))
    assert getattr(load_config(write(tmp_path, line + "\n")).config, key) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\nargs.seed = 1 / 0", ", line 2 stops with ZeroDivisionError: division by zero; fix it"),
        ("args.seed = other.value", ", line 1 stops with NameError: name 'other' is not defined"),
        ("args.seed = args.no_such_key", "no_such_key is not set before this line"),
        ("import sys\nsys.exit(0)", ", line 2 stops with SystemExit: 0"),
        ("import no_such_neighbour", "ModuleNotFoundError: No module named 'no_such_neighbour'"),
        ("def f():\n    f()\nf()", "RecursionError"),
        ("import datetime\nargs.output_dir = datetime.datetime.now().strftime('%c')", "made of %Y %m %d %H %M %S"),
        (
            "from tinyvae.config import load_preset\nconfig = load_preset('h10')",
            ", line 2: there is no preset 'h10'. Did you mean 'h100'?",
        ),
        ("args.seed = = 1", "line 1 is not valid Python"),
        ("args.seed = " + "(" * 5000, "is not valid Python"),
        ("settings = 3", "sets neither args nor config"),
        ("", "sets neither args nor config"),
        ("args = 3", "sets neither args nor config"),
        ("args.seed = 1\nfrom tinyvae.config import TrainConfig\nconfig = TrainConfig(seed=1)", "both args and config"),
    ],
)
def test_a_file_that_gives_no_settings_ends_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path, text + "\n")
    told = refusal(file)
    assert words in told and told.startswith(str(file)) and "\n" not in told


def test_a_file_that_raises_ends_the_command_with_code_2(tmp_path: Path) -> None:
    file = write(tmp_path, "print('hello')\nraise OSError('no disk\\nhere')\n")
    done = subprocess.run([sys.executable, "-m", "tinyvae", "train", str(file)], capture_output=True, text=True)
    assert done.returncode == 2 and "line 2 stops with OSError: no disk here" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == "hello\n"


def test_a_huge_file_is_not_run(tmp_path: Path) -> None:
    assert "is too large for settings" in refusal(write(tmp_path, "#" * 2**20 + "\nargs.seed = 1\n"))


def test_running_a_file_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its folder is on the path while it runs; a second file may have other neighbours of the same name."""
    real = (builtins.__import__, datetime.datetime, sys.path.copy(), Path.cwd(), sys.argv.copy())
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        easy = "from easydict import EasyDict\nfrom datetime import datetime\nargs = EasyDict()\n"
        write(folder, f"{easy}args.seed = {seed}\nargs.output_dir = f'{{datetime.now():%Y}}'\n", "base_file.py")
        file = write(folder, "import os, sys\nfrom base_file import args\nos.chdir('/')\nsys.path.append('x')\n")
        config = load_config(file).config
        assert config.seed == seed and config.output_dir == folder / "%Y"
        with pytest.raises(UserError, match="ValueError"):
            load_config(write(folder, "import base_file\nraise ValueError\n"))
    assert real == (builtins.__import__, datetime.datetime, sys.path, Path.cwd(), sys.argv)
    assert not {"base_file", "easydict", "settings"} & set(sys.modules)


def test_only_the_file_itself_sees_changed_modules(tmp_path: Path) -> None:
    write(tmp_path / "package", "import datetime\nNOW = datetime.datetime.now().strftime('%Y')\n", "__init__.py")
    file = write(tmp_path, "from package import NOW\nargs.tracker_name = NOW\n")
    assert load_config(file).config.tracker_name == str(datetime.datetime.now().year)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(text=st.text(alphabet="args.=0 \n\t'é(\0", max_size=60))
def test_any_text_loads_or_ends_in_a_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "any.py"
    file.write_text(text, encoding="utf-8", errors="replace")
    try:
        load_config(file)
    except UserError as mistake:
        assert str(mistake)


def test_a_file_in_the_style_of_the_presets(tmp_path: Path) -> None:
    text = (
        "from dataclasses import replace\nfrom tinyvae.config import load_preset\n"
        'config = replace(load_preset("scratch"), max_train_steps=700, data_root="clips")\n'
    )
    config = load_config(write(tmp_path, text)).config
    assert (config.max_train_steps, config.optimizer, config.train_batch_size) == (700, "muon", 16)
    assert config.data_root == tmp_path / "clips"
    plain = "from tinyvae.config.schema import TrainConfig\nconfig = TrainConfig(seed=3)\n"
    assert load_config(write(tmp_path, plain)).config.seed == 3
    bare = "from tinyvae.config import load_preset\nconfig = load_preset('scratch')\n"
    assert load_config(write(tmp_path, bare)).config.tracker_name == "scratch"
    real = "import tinyvae.config.load as load, dataclasses\nstart = load.load_preset('scratch')\n"
    config = load_config(write(tmp_path, f"{real}config = dataclasses.replace(start, seed=4)\n")).config
    assert (config.seed, config.train_batch_size) == (4, 16)


def test_a_file_may_use_our_older_spelling_and_read_what_it_starts_from(tmp_path: Path) -> None:
    text = (
        "import dataclasses\nfrom tinyvae.config_files import load_preset\nstart = load_preset('a800')\n"
        "config = dataclasses.replace(start, height=start.height // 2, seed=start.seed + 1, use_ref_vae=False)\n"
    )
    loaded = load_config(write(tmp_path, text))
    assert (loaded.config.height, loaded.config.seed) == (240, 43)
    assert loaded.config.encoder_loss_weight == 0, "the file is a later layer than the preset it starts from"
    assert any("mine.py turns use_ref_vae off" in notice for notice in loaded.notices)


def test_all_mistakes_of_a_file_in_the_style_of_the_presets(tmp_path: Path) -> None:
    text = "from tinyvae.config import TrainConfig\nconfig = TrainConfig(\n    hieght=3,\n    seed=-1,\n    beta1='x')"
    told = refusal(write(tmp_path, text))
    for words in (
        "3 mistakes",
        "line 3). Did you mean 'height'?",
        "seed=-1 must be a whole number, at least 0",
        "line 4",
        "beta1='x'",
    ):
        assert words in told


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "args.height = 64")

    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert f"{file} cannot be read (Permission denied); fix its permissions" in refusal(file)
    monkeypatch.setattr(Path, "is_file", refuse)
    assert "cannot be read (Permission denied)" in refusal(file)


def test_homes_of_strangers_and_endless_names_are_mistakes_among_others() -> None:
    assert "~nobody-here/a.py: there is no home folder ~nobody-here" in refusal("~nobody-here/a.py")
    assert "cannot be read (File name too long)" in refusal("a" * 300)
    text = refusal("scratch", ["--data_root", "~nobody-here/clips", "--seed", "-1"])
    assert "2 mistakes" in text and "seed='-1' must be" in text
    assert "data_root=~nobody-here/clips (the command line): there is no home folder ~nobody-here" in text
    with pytest.raises(UserError, match=r"data_root=.* cannot be read \(File name too long\)"):
        check_config(TrainConfig(data_root=Path("a" * 300)))
    with pytest.raises(UserError, match="data_root=/dev/null is a file"):
        check_config(TrainConfig(data_root=Path("/dev/null")))


@pytest.mark.parametrize(
    ("file", "preset"),
    [
        ("taehv_config_a800_fixed.py", "a800"),
        ("taehv_config_h100.py", "h100"),
        ("taehv_config_16gpu_h100.py", "16gpu_h100"),
        ("taehv_config_1gpu_h100.py", "1gpu_h100"),
        ("taehv_config_test.py", "test"),
    ],
)
def test_a_missing_file_of_the_old_trainer_names_its_preset(file: str, preset: str) -> None:
    assert f"The settings of this file are the preset {preset} now" in refusal(f"training/configs/{file}")


@pytest.mark.parametrize(
    ("words", "says", "not_says"),
    [
        (["--use_amp", "true"], "Did you mean 'mixed_precision'?", "use_sample_clips"),
        (["--num_workers", "8"], "Did you mean 'dataloader_num_workers'?", ""),
        (["--batch_size", "8"], "Did you mean 'train_batch_size'?", ""),
        (["--fps", "8"], "there is no setting 'fps'", "Did you mean"),
    ],
)
def test_a_name_is_suggested_only_where_it_is_near(words: list[str], says: str, not_says: str) -> None:
    text = refusal("quickstart", words)
    assert says in text and (not not_says or not_says not in text)


def test_what_is_neither_preset_nor_file(tmp_path: Path) -> None:
    assert "nopreset" in refusal("nopreset") and "Did you mean" not in refusal("nopreset")
    assert f"{tmp_path} is a folder without config.json" in refusal(tmp_path)
    text = refusal("h10")
    assert "there is no preset or file 'h10'" in text and "Did you mean 'h100'?" in text and "quickstart" in text
    with pytest.raises(MissingFileError):
        load_config(tmp_path / "none.py")
    yaml = write(tmp_path, "data_root: clips\n", "mine.yaml")
    assert "mine.yaml is YAML, and settings are written in Python" in refusal(yaml)
    (tmp_path / "picture.py").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(tmp_path / "picture.py")


# overrides


def test_forms_of_an_override() -> None:
    words = "--height 64 --width=96 --no-random_flip --compile_model --max-train-steps 5 --resume latest"
    words += " --gaussian_blur_sigma 0.5 1.5 --lr_warmup_steps 1"
    config = load_config("quickstart", words.split()).config
    assert (config.height, config.width, config.max_train_steps) == (64, 96, 5)
    assert config.random_flip is False and config.compile_model is True
    assert config.gaussian_blur_sigma == (0.5, 1.5)
    assert config.resume_from_checkpoint == "latest"


def test_an_override_can_empty_a_key_and_the_last_one_counts() -> None:
    config = load_config("h100", ["--checkpoints_total_limit", "none", "--seed", "1", "--seed=2"]).config
    assert config.checkpoints_total_limit is None
    assert config.seed == 2


def test_overrides_as_python_values() -> None:
    assert load_config("quickstart", {"learning_rate": 2e-3}).config.learning_rate == 2e-3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hieght", "64"], "Did you mean 'height'?"),
        (["--height"], "--height needs a value"),
        (["--height", "tall"], "height='tall' must be a whole number"),
        (["--no-height"], "height is not a switch"),
        (["--no-random_flip=1"], "takes no value"),
        (["64"], "'64' is not a setting; settings are written as --key value"),
        (["--random_flip", "maybe"], "'maybe' is not a setting; settings are written as --key value"),
        (["--random_flip=maybe"], "random_flip='maybe' must be true or false"),
        (["--height", "none"], "height='none' must be a whole number"),
        (["--lr", "1e-3"], "there is no setting 'lr' (the command line). Did you mean 'learning_rate'?"),
        (["--lr_scheduler", "cosin"], "Did you mean 'cosine'?"),
    ],
)
def test_a_wrong_override_is_named(words: list[str], expected: str) -> None:
    assert expected in refusal("quickstart", words)


def test_a_mistyped_switch_does_not_take_the_preset_for_its_value() -> None:
    with pytest.raises(UserError, match=r"no setting 'compile_modell'.*Did you mean 'compile_model'"):
        cli.run(["train", "--compile_modell", "quickstart"])


def test_a_key_that_went_is_known_in_files_and_runs_of_before(tmp_path: Path) -> None:
    says = "persistent_workers is not a setting any more: training is one endless pass over the data"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(to_json(TrainConfig())) | {"persistent_workers": True}))
    for source in (tmp_path, write(tmp_path, "args.persistent_workers = True")):
        assert [notice for notice in load_config(source).notices if notice.startswith(says)]


def test_old_keys_on_the_command_line_get_their_line() -> None:
    assert any("world_size" in notice for notice in load_config("quickstart", ["--world_size", "8"]).notices)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text("-=_no1é\0", max_size=8) | st.sampled_from([f"--{key}" for key in FIELDS]), max_size=5))
def test_any_words_parse_or_end_in_a_sentence(words: list[str]) -> None:
    try:
        parse_words(words)
    except UserError as mistake:
        assert str(mistake)


# a later layer wins over what it contradicts


def test_turning_the_teacher_off_drops_its_losses_and_says_so() -> None:
    loaded = load_config("h100", ["--no-use_ref_vae"])
    assert loaded.config.encoder_loss_weight == loaded.config.decoder_loss_weight == 0
    assert "encoder_loss_weight is set to 0, because the command line turns use_ref_vae off." in loaded.notices


def test_a_weight_of_zero_turns_seraena_off_and_says_so() -> None:
    loaded = load_config("h100", ["--seraena_loss_weight", "0"])
    assert loaded.config.use_seraena is False
    assert any("use_seraena is set to false" in notice for notice in loaded.notices)


def test_a_run_that_is_cut_short_has_a_short_beginning_and_says_so(tmp_path: Path) -> None:
    loaded = load_config("h100", ["--max_train_steps", "50"])
    assert (loaded.config.lr_warmup_steps, loaded.config.seraena_start) == (5, 5)
    assert "lr_warmup_steps is set to 5, because the command line sets max_train_steps to 50." in loaded.notices
    assert load_config("h100", ["--max_train_steps", "5000"]).config.lr_warmup_steps == 2_000, "it fits, so it stays"
    assert load_config(write(tmp_path, "args.max_train_steps = 20")).config.lr_warmup_steps == 2, "a default gives way"
    both = ["--max_train_steps", "20", "--lr_warmup_steps", "30"]
    assert "lr_warmup_steps=30 is more than max_train_steps=20" in refusal("quickstart", both)


def test_one_size_and_several_exclude_each_other_and_the_later_wins(tmp_path: Path) -> None:
    loaded = load_config("h100", ["--resolutions", "16x480x720:0.3,17x256x256:0.7"])
    assert loaded.config.resolutions == ("16x480x720:0.3", "17x256x256:0.7")
    loaded = load_config("scratch", ["--resolutions=8x64x64,8x32x48@20,8x32x32"])
    assert (loaded.config.n_frames, loaded.config.height, loaded.config.width) == (8, 64, 64), "the largest of them"
    said = "the size for validation and messages is 8x64x64, because that is the largest of the resolutions that the"
    assert any(notice.startswith(said) for notice in loaded.notices)
    run = tmp_path / "config.json"
    run.write_text(to_json(loaded.config))
    assert load_config(run).config.sizes == loaded.config.sizes
    again = load_config(run, ["--height", "32"])
    assert again.config.resolutions == () and again.config.height == 32
    assert "resolutions is set to none, because the command line sets height." in again.notices
    assert load_config(run, ["--resolutions", "none"]).config.resolutions == ()
    mine = write(tmp_path, "args.resolutions = ['12x128x128', '20x128x128@70%']\nargs.max_train_steps = 1000\n")
    assert load_config(mine).config.sizes.in_words() == "12x128x128, from step 700 on 20x128x128"
    small = load_config(mine, ["--height", "64", "--width", "64"])
    assert small.config.sizes.in_words() == "12x64x64", "the frames of its first steps"
    short = load_config(mine, ["--variant", "taeh3"])
    assert short.config.sizes.in_words() == "17x128x128"
    assert "resolutions is set to none, because taeh3 takes no clips of 12 frames." in short.notices
    both = ["--resolutions", "8x64x64", "--width", "32"]
    assert "width=32 and resolutions (the command line) exclude each other" in refusal("scratch", both)
    mine = write(tmp_path, "args.resolutions = ['8x64x64', '4x32x32:2']\n")
    assert load_config(mine).config.resolutions == ("8x64x64", "4x32x32:2")
    assert "resolutions: '8x64' is no size; write FRAMESxHEIGHTxWIDTH" in refusal(
        write(tmp_path, "args.resolutions = '8x64'\n")
    )
    wrong = refusal(write(tmp_path, "args.resolutions = [(8, 64, 64)]\n"))
    assert "resolutions=[(8, 64, 64)] must be sizes such as 16x480x720:0.3,16x256x256:0.7" in wrong


def test_a_contradiction_inside_one_layer_is_a_mistake(tmp_path: Path) -> None:
    assert "needs a teacher" in refusal("quickstart", ["--no-use_ref_vae", "--encoder_loss_weight", "0.1"])
    assert "needs a teacher" in refusal(write(tmp_path, "args.use_ref_vae = False\nargs.encoder_loss_weight = 1.0\n"))


def test_another_teacher_takes_the_place_of_the_presets(tmp_path: Path) -> None:
    assert load_config("h100", ["--ref_vae_path", "owner/vae"]).config.teacher_path == "owner/vae"
    loaded = load_config(write(tmp_path, OLD_STYLE), ["--ref_vae_path", "owner/vae"])
    assert (loaded.config.ref_vae_type, loaded.config.teacher_path) == (None, "owner/vae")
    assert any("ref_vae_type is set to none" in notice for notice in loaded.notices)
    named = load_config("scratch", ["--cogvideox_model_path", "owner/vae"]).config
    assert (named.ref_vae_path, named.ref_vae_type) == ("owner/vae", "cogvideox"), "the old name means both"
    assert "name two teachers" in refusal("h100", ["--ref_vae_path", "a/b", "--cogvideox_model_path", "c/d"])


def test_own_data_are_never_mixed_with_sample_clips(tmp_path: Path) -> None:
    loaded = load_config("quickstart", ["--data_root", str(tmp_path / "typo")])
    assert loaded.config.use_sample_clips is False
    with pytest.raises(UserError, match=r"data_root=.*typo does not exist"):
        check_config(loaded.config, loaded.given_paths)
    listed = load_config("quickstart", ["--annotation_file", str(tmp_path / "list.json")])
    assert (listed.config.use_sample_clips, listed.config.data_root) == (False, None)
    assert "data_root is set to none, because the command line names annotation_file." in listed.notices
    both = load_config("quickstart", ["--index_path", "a.tvi", "--data_root", str(tmp_path)])
    assert both.config.data_root == tmp_path


def test_to_turn_random_crop_off_ends_the_choice_of_crops() -> None:
    loaded = load_config("scratch", ["--no-random_crop"])
    assert loaded.config.crop_candidates == 1
    assert "crop_candidates is set to 1, because the command line turns random_crop off." in loaded.notices
    assert "crop_candidates=4 needs random_crop" in refusal("scratch", ["--no-random_crop", "--crop_candidates", "4"])


def test_a_later_list_of_videos_takes_the_place_of_an_earlier_index(tmp_path: Path) -> None:
    file, words = write(tmp_path, "args.index_path = 'a.tvi'\n"), ["--annotation_file", "b.json"]
    loaded = load_config(file, words)
    assert loaded.config.index_path is None and loaded.config.data_source == Path.cwd() / "b.json"
    assert "index_path is set to none, because the command line names annotation_file." in loaded.notices
    assert load_config(file, [*words, "--index_path", "c.tvi"]).config.data_source == Path.cwd() / "c.tvi"


# where paths start from


def test_a_files_paths_are_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    file = write(
        project / "configs" / "deep", "args.pretrained_model_path = 'checkpoints/taecvx.pth'\nargs.variant='taecvx'"
    )
    (project / ".git").mkdir()
    configs = []
    for folder in (tmp_path, project, project / "configs"):
        monkeypatch.chdir(folder)
        configs.append(load_config(file).config)
        configs.append(load_config(os.path.relpath(file)).config)
    assert all(config == configs[0] for config in configs)
    assert configs[0].pretrained_model_path == project / "checkpoints" / "taecvx.pth"


def test_a_missing_file_ends_in_key_path_and_base(tmp_path: Path) -> None:
    file = write(tmp_path, "args.pretrained_model_path = '../checkpoints/taecvx.pth'\nargs.variant = 'taecvx'")
    loaded = load_config(file)
    with pytest.raises(UserError) as caught:
        check_config(loaded.config, loaded.given_paths)
    text = str(caught.value)
    assert "pretrained_model_path=../checkpoints/taecvx.pth does not exist" in text
    assert f"looked for {tmp_path.parent}/checkpoints/taecvx.pth, from {tmp_path}" in text


def test_a_file_without_a_project_starts_from_its_own_folder(tmp_path: Path) -> None:
    assert project_of(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "pyproject.toml").touch()
    assert project_of(tmp_path / "a" / "b") == tmp_path


def test_the_home_folder_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert project_of(tmp_path / "work") == tmp_path / "work"


def test_a_user_without_a_home_has_projects_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that starts with any user number."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54_321)  # nobody's
    (tmp_path / ".git").mkdir()
    assert project_of(tmp_path / "work") == tmp_path


def test_paths_of_the_command_line_start_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    config = load_config("scratch", ["--data_root", "clips", "--resume", "../out/checkpoint-5"]).config
    assert config.data_root == tmp_path / "sub" / "clips"
    assert config.resume_from_checkpoint == str(tmp_path / "out" / "checkpoint-5")
    assert config.output_dir.parent == tmp_path / "output", "a preset's own paths start from the shell's project"
    assert load_config("scratch", ["--resume", "checkpoint-5"]).config.resume_from_checkpoint == "checkpoint-5"


def test_a_teacher_is_a_folder_or_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()

    def teacher(name: str) -> str | None:
        return load_config("h100", ["--cogvideox_model_path", name]).config.ref_vae_path

    assert teacher("zai-org/CogVideoX-2b") == "zai-org/CogVideoX-2b"
    assert teacher("models/CogVideoX-2b") == str(tmp_path / "models" / "CogVideoX-2b"), "a folder with a mistake in it"
    assert teacher("CogVideoX-2b") == str(tmp_path / "CogVideoX-2b")


def test_the_variant_comes_from_the_weights_where_nothing_states_it(tmp_path: Path) -> None:
    save_model(TAEHV("taew2_2", width=0.125), tmp_path / "start.safetensors")
    text = "args.pretrained_model_path = 'start.safetensors'\nargs.model_width = 0.125\nargs.patch_size = 2\n"
    loaded = load_config(write(tmp_path, text))
    assert loaded.config.variant == "taew2_2"
    assert any("variant is set to taew2_2" in notice for notice in loaded.notices)


def bare_weights(file: Path, variant: str) -> Path:
    """Weights as they are published: nothing in the file states the variant."""
    file.parent.mkdir(exist_ok=True)
    torch.save(dict(TAEHV(variant, width=0.125).state_dict()), file)
    return file


def test_published_weights_are_not_trained_as_another_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """taecvx.pth has the shapes of taehv: without a word it would be trained, and exported, as taehv."""
    bare_weights(tmp_path / "checkpoints/taecvx.pth", "taecvx")
    text = "args.use_ref_vae = False\nargs.model_width = 0.125\n"
    file = write(tmp_path, text + "args.pretrained_model_path = 'checkpoints/taecvx.pth'\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(file)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "its name speaks of taecvx; say which it is with --variant taecvx" in said
    assert load_config(file, ["--variant", "taecvx"]).config.variant == "taecvx"
    assert load_config(file, ["--variant", "taehv"]).config.variant == "taehv", "what the user says is obeyed"
    text += "args.variant = 'taehv'\nargs.pretrained_model_path = 'checkpoints/taecvx.pth'\n"
    both = write(tmp_path, text, "both.py")
    assert load_config(both).config.variant == "taehv", "said in one file, of these weights"
    bare_weights(tmp_path / "checkpoints/taecvx.pth", "taew2_2")
    assert load_config(file).config.variant == "taew2_2", "a name is believed where the weights allow it"


def test_a_presets_variant_is_not_said_of_other_weights(tmp_path: Path) -> None:
    given = ["--model_width", "0.125", "--pretrained_model_path"]
    with pytest.raises(UserError, match="taken for taehv, but its name speaks of taecvx"):
        load_config("quickstart", [*given, str(bare_weights(tmp_path / "taecvx.pth", "taecvx"))])
    save_model(TAEHV("taecvx", width=0.125), tmp_path / "mine.pth")
    with pytest.raises(UserError, match=r"mine\.pth are taecvx, and preset quickstart sets variant to taehv; say"):
        load_config("quickstart", [*given, str(tmp_path / "mine.pth")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = load_config("quickstart", [*given, str(bare_weights(tmp_path / "start.pth", "taehv"))])
    assert plain.config.variant == "taehv", "weights that do not speak are of the preset's variant"


def test_a_guess_is_not_told_as_knowledge(tmp_path: Path) -> None:
    bare_weights(tmp_path / "start.pth", "taecvx")
    with pytest.warns(UserWarning, match="could be taehv, taecvx"):
        loaded = load_config(write(tmp_path, "args.pretrained_model_path = 'start.pth'\nargs.model_width = 0.125\n"))
    (notice,) = (notice for notice in loaded.notices if "variant is set" in notice)
    assert "nothing tells which of taehv, taecvx, taew2_1, taeos1_3" in notice


# run folders


def test_weights_that_cannot_be_read_are_one_mistake_among_others(tmp_path: Path) -> None:
    (tmp_path / "broken.pth").write_bytes(b"nothing")
    text = refusal(write(tmp_path, 'args.pretrained_model_path = "broken.pth"\nargs.hieght = 64\n'))
    assert "2 mistakes" in text and "pretrained_model_path: " in text and "Did you mean 'height'?" in text


def test_the_trackers_folder_may_lie_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load_config("quickstart", ["--logging_dir", "~/boards"]).config.logging_dir == Path("/home/me/boards")
    assert load_config("quickstart", ["--logging_dir", "boards"]).config.logging_dir == Path("boards")


def test_a_run_folder_gets_its_time_once() -> None:
    now = datetime.datetime(2026, 11, 15, 7, 8, 9)
    assert new_run_folder(Path("/out/%Y-%m-%d_%H-%M-%S"), now) == Path("/out/2026-11-15_07-08-09")
    assert new_run_folder(Path("/100%/x"), now) == Path("/100%/x")
    assert has_time(Path("a/%Y")) and not has_time(Path("a/100%"))


def test_earlier_runs_of_the_experiment_newest_first(tmp_path: Path) -> None:
    names = ["a800_2026-01-02", "a800_2025-12-31", "a800_2026-01-10"]
    for name in [*names, "h100_2026-01-03", "a800_notes", "a800_2026-1-3"]:
        (tmp_path / name).mkdir()
    (tmp_path / "a800_2026-02-02").touch()
    found = [folder.name for folder in earlier_run_folders(tmp_path / "a800_%Y-%m-%d")]
    assert found == ["a800_2026-01-10", "a800_2026-01-02", "a800_2025-12-31"]
    assert earlier_run_folders(tmp_path / "h100_2026-01-03") == [tmp_path / "h100_2026-01-03"]
    assert earlier_run_folders(tmp_path / "nowhere") == []
    (tmp_path / "2026" / "b").mkdir(parents=True)
    assert earlier_run_folders(tmp_path / "%Y" / "b") == [tmp_path / "2026" / "b"]


# JSON and trackers


def test_json_round_trip(tmp_path: Path) -> None:
    config = replace(load_config("h100").config, data_root=tmp_path, seraena_start="auto", checkpoints_total_limit=None)
    (tmp_path / "config.json").write_text(to_json(config))
    assert load_config(tmp_path).config == config
    content = json.loads(to_json(config))
    assert content["format"] == "tinyvae-run" and set(FIELDS) <= set(content)
    (tmp_path / "config.json").write_text(json.dumps(content | {"cogvideox_model_path": None}))
    assert load_config(tmp_path).config == config, "as runs before this version wrote it"


def test_a_runs_config_loads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("quickstart").config
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(to_json(config))
    monkeypatch.chdir(tmp_path)
    assert load_config(run).config == load_config(run / "config.json").config == config
    assert load_config(run, ["--seed", "5"]).config == replace(config, seed=5)


def test_the_config_of_a_resumed_run_makes_a_new_run(tmp_path: Path) -> None:
    config = load_config("quickstart", ["--resume", "latest", "--allow_changed_settings"]).config
    (tmp_path / "config.json").write_text(to_json(config))
    for source in (tmp_path, tmp_path / "config.json"):
        again = load_config(source, ["--seed", "7"]).config
        assert again == replace(config, seed=7, resume_from_checkpoint=None, allow_changed_settings=False)
        assert has_time(again.output_dir), "a folder of its own"
    asked = load_config(tmp_path, ["--resume", "checkpoint-2"]).config
    assert asked.resume_from_checkpoint == "checkpoint-2", "the command line still has its say"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("{}", "is not the config.json of a run"),
        ('{"format": "tinyvae-run", "hieght": 1}', "hieght"),
        ('{"format": "tinyvae-run", "height": "x"}', "height='x' must be a whole number"),
    ],
)
def test_a_broken_json_ends_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(write(tmp_path, text, "config.json"))


def test_a_checkpoint_in_place_of_settings_is_told_how_it_goes_on(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoint-2"
    save_model(TAEHV("taehv", width=0.125), checkpoint)
    with pytest.raises(UserError, match=f"tinyvae train {checkpoint.parent} --resume {checkpoint}"):
        load_config(checkpoint)


def test_the_help_of_a_preset_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "1gpu_h100", "--log_every", "7", "--help"]) == 0
    text = capsys.readouterr().out
    assert "1 x H100 80 GB" in text
    assert "--learning_rate (a number, above 0 and at most 1; default 0.0001; here 0.0005)" in text
    assert "default 10; here 7)" in text
    assert cli.run(["train", "--help"]) == 0
    assert "quickstart  See it work" in capsys.readouterr().out


# what the settings' own words point at


def test_the_page_of_the_losses_says_which_ones_have_a_choice_of_distance() -> None:
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    section = text.split("## Reconstruction, encoder, decoder, temporal")[1].split("##")[0]
    words = " ".join(section.split())
    assert "encoder and temporal losses are mean squared errors" in words
    assert "For the reconstruction and decoder losses, `reconstruction_loss_type` chooses" in words


def test_a_url_is_kept_as_it_is_written_and_comes_back_from_a_run(tmp_path: Path) -> None:
    words = ["--index_path", "file:///data/i.tvi", "--annotation_file", "hf://datasets/me/it/list.json"]
    config = load_config(write(tmp_path, "args.data_root = 's3://bucket/videos/'\n"), words).config
    assert config.data_root == Url("s3://bucket/videos") and config.index_path == Path("/data/i.tvi")
    (tmp_path / "config.json").write_text(to_json(config))
    again = load_config(tmp_path / "config.json").config
    assert again == config and str(again.annotation_file) == "hf://datasets/me/it/list.json"
    with pytest.raises(UserError, match=r"output_dir=s3://bucket/run is a URL, and output_dir must be on this machine"):
        load_config("scratch", ["--output_dir", "s3://bucket/run"])

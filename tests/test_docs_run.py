"""Every `python` and `bash` block of the documents runs here at small size, or a list says why it cannot.

A block of shell commands runs line by line in a folder of its own that holds stand-ins for the files that documents
name: short videos, models of an eighth of the width, a small teacher. `SUBSTITUTIONS` puts them into the commands, and
`OPTIONS` makes each verb small. The Chinese pages have the same code (tests/test_docs.py), so they do not run again.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.documents import DOCUMENTS, FENCE, ROOT, flags_in
from tests.models.hub_server import TOKEN, Hub
from tests.models.test_hub import hub  # noqa: F401 (a fixture)
from tests.processes import HANGS_S
from tests.training.test_golden_losses import write_lpips, write_teacher
from tests.video.small_videos import write_video
from tinyvae import TAEHV, load_model, save_model
from tinyvae.cli.main import run
from tinyvae.config import load_preset
from tinyvae.config.schema import to_json

BLOCK = re.compile(r"^( *)```(python|bash)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

CANNOT: dict[str, str] = {
    r"^python3 -m venv |^pip install ": "installs packages: .ci/run does it in fresh environments",
    r"^pytest|^ruff |^pre-commit |^\.ci/run|^mkdocs ": "is what CI runs",
    r"(?:train_taehv|train_taehv_h100|auto_recovery_train)\.sh\b": "needs the GPUs that it names: "
    "tests/test_launchers_real.py runs the launchers on a CPU",
    r"--gpus 8": "needs eight GPUs",
    r"^accelerate launch ": "needs two machines with eight GPUs each",
    r"^sbatch |^srun |^#SBATCH": "needs a Slurm cluster",
    r"^ray start |--ray auto": "needs a Ray cluster: tests/data/test_ray_cluster.py starts one",
    r"^nsys |^watch ": "needs a GPU and NVIDIA's tools",
    r"s3://|hf://": "needs an object store: tests/test_storage.py has one",
    r"^tinyvae lpips-weights": "needs a network",
    r"notify_command '(?:curl|echo)": "needs a network or a mail server: tests/training/test_notify.py has others",
    r"^tail -f |^python -m http\.server": "does not end by itself",
    r"^tinyvae train quickstart$": "takes minutes: .ci/run does it",
    r"chaos\.py": "takes an hour",
    r"low_latency=True": "needs a CUDA graph: tests/gpu runs these calls",
}
"""Commands and python blocks that cannot run here, as patterns, each with its reason."""

RUN_ELSEWHERE = {
    ("diffusers.md", "python"): "tests/test_diffusers_pipelines.py",
    ("configuration.md", "python"): "tests/test_docs_names.py",
}

SUBSTITUTIONS = {
    r"/data/latents": "latents",
    r"/models/Wan2\.1/vae": "wan_teacher",
    r"--output_dir output/my_student": "--output_dir output/made",
    r"checkpoints/taew2_1\.pth": "lighttaew2_1.safetensors",
    r"/data/videos|/data/val|videos/val|(?<=--data_root )clips|videos/(?= )": "videos",
    r"(?<=--preset )(?:h100|distill)": "quickstart",
    r"output/RUN_B": "taehv.safetensors",
    r"\b(?:RUN_OR_FILE|MODEL|output/RUN(?:_A)?)(?= |$)": "output/my_run",
    r"output/my_run(?= --to (?:lightx2v|sdcpp))": "output/wan_run",
    r"output/my_run(?= --keep 0.5)": "output/wide_run",
    r"--model_width 0.5(?= --pretrained)": "--model_width 0.125",
    r"output/my_run(?= --to (?:comfyui|diffusers|upstream))": "output/full_run",
    r"480x720": "32x48",
    r"256x256": "32x32",
    r"128x128": "16x16",
    r"\b1[26](?=x\d+x\d+)": "8",
    r"--(max_train_steps) \d+": r"--\1 3",
    r"@2000": "@1",
    r"@8000": "@2",
    r"--clips \d{3,}": "--clips 4",
    r"--num_samples 5": "--num_samples 1 --data_root videos",
}


def settings(words: str) -> dict[str, str]:
    return dict(word.split("=") for word in words.split())


SMALL_RUN = settings(
    "output_dir=output/made_%Y-%m-%d_%H-%M-%S height=32 width=32 n_frames=8 model_width=0.125 max_frame_delta=1 "
    "validation_height=32 validation_width=32 validation_n_frames=8 num_validation_samples=1 train_split=0.8 "
    "train_batch_size=1 gradient_accumulation_steps=1 max_train_steps=2 lr_warmup_steps=1 validation_steps=2 "
    "checkpointing_steps=2 mixed_precision=no compile_model=false dataloader_num_workers=0 report=false "
    "save_validation_videos=false"
)
SMALL_TEACHER = settings(
    "ref_vae_path=teacher lpips_weights=lpips.safetensors pretrained_model_path=none seraena_buffer_mb=1"
)
OPTIONS = {
    "bench": settings("size=32x32 frames=5 repeats=3"),
    "prune": settings("max_clips=1"),
    **dict.fromkeys(("train", "check", "latents"), SMALL_RUN),
    **dict.fromkeys(("eval", "compare"), settings("size=32x32 frames=9")),
}
"""What is added to the commands of a verb, except what they say themselves."""

SLOW = ("train", "check", "latents", "export", "compare", "eval", "prune")
"""Verbs that take more than a second even when small."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: the file, the line of its fence, its language and its text."""

    page: Path
    line: int
    kind: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    def commands(self) -> list[str]:
        """The commands of a shell block, without comments; a continued line is one."""
        lines = self.text.replace("\\\n", " ").splitlines()
        bare = [re.sub(r"(?:^|\s+)#(?!SBATCH).*", "", line).strip() for line in lines]
        return [command for line in bare for command in re.split(r" ; ", line) if command]


def find_blocks() -> list[Block]:
    found = []
    for page in DOCUMENTS:
        if page.with_suffix("").suffix == ".zh-CN":
            continue
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(page=page, line=line, kind=match[2], text=match[3]))
    return found


BLOCKS = find_blocks()


def why_not(code: str) -> str | None:
    """Why a command or a python block cannot run here; None if it can."""
    return next((reason for pattern, reason in CANNOT.items() if re.search(pattern, code)), None)


def units(block: Block) -> list[str]:
    """What runs or is listed as one: a command of a shell block, a whole python block."""
    return [block.text] if block.kind == "python" else block.commands()


def can_run(block: Block) -> bool:
    return (block.page.name, block.kind) not in RUN_ELSEWHERE and not all(map(why_not, units(block)))


def is_slow(block: Block) -> bool:
    return block.kind == "bash" and any(f"tinyvae {verb} " in command for command in units(block) for verb in SLOW)


def runnable(kind: str) -> list[object]:
    blocks = [block for block in BLOCKS if block.kind == kind and can_run(block)]
    return [pytest.param(block, id=block.name, marks=[pytest.mark.slow] * is_slow(block)) for block in blocks]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files under the names that the documents use. Treat as read-only."""
    folder = tmp_path_factory.mktemp("stand_ins")
    torch.manual_seed(3)
    videos = folder / "videos"
    for number in range(6):
        write_video(videos / f"clip_{number}.mp4", frames=20, width=160, height=128, seed=number)
    for name in ("clip.mp4", "film.mp4"):
        write_video(folder / name, frames=17)
    taecvx, wan = TAEHV("taecvx", width=0.125), TAEHV("taew2_2", width=0.125)
    for file in ("final_model.pth", "best_model/model.pth", "checkpoint-5000/model.pth"):
        save_model(taecvx, folder / "output" / "old_run" / file)
    for file in ("checkpoints/taecvx.pth", "weights.safetensors"):
        save_model(taecvx, folder / file)
    for file in ("A.safetensors", "taew2_2.safetensors"):
        save_model(wan, folder / file)
    save_model(TAEHV("taew2_2", width=0.125), folder / "B.safetensors")
    save_model(TAEHV("taehv", width=0.125), folder / "taehv.safetensors")
    for file, variant in (("lighttaew2_1", "taew2_1"), ("lighttaehy1_5", "taehv1_5")):  # files that state nothing
        save_file(TAEHV(variant, width=0.125).state_dict(), folder / f"{file}.safetensors")
    runs = {"my_run": TAEHV("taehv", width=0.125), "full_run": TAEHV("taehv"), "wan_run": TAEHV("taew2_2")}
    runs["wide_run"] = TAEHV("taehv", width=0.25)  # to be pruned
    for name, model in runs.items():  # two of full width: most other programs load no other
        config = replace(load_preset("scratch"), variant=model.spec.name, model_width=model.spec.width)
        save_model(model, folder / "output" / name / "best_model")
        (folder / "output" / name / "config.json").write_text(to_json(config))
    student = folder / "output" / "my_student"
    save_model(TAEHV("taew2_1"), student / "best_model")
    save_model(TAEHV("taew2_1", width=0.125), folder / "output" / "small_student")
    student_of = replace(load_preset("distill"), variant="taew2_1", ref_vae_path="wan_teacher")
    (student / "config.json").write_text(to_json(student_of))
    diffusers = pytest.importorskip("diffusers")
    diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1).save_pretrained(folder / "wan_teacher")
    save_model(wan, folder / "run_or_file")
    earlier = replace(load_preset("scratch"), data_root=videos)
    (folder / "output" / "2026-11-15_10-00-00").mkdir()
    (folder / "output" / "2026-11-15_10-00-00" / "config.json").write_text(to_json(earlier))
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "configs").mkdir()
    shutil.copy(ROOT / "examples" / "my_settings.py", folder / "configs" / "mine.py")
    shutil.copy(ROOT / "inference.py", folder)
    return folder


@pytest.fixture
def scratch(stand_ins: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A folder to run in, with all stand-ins and a hub that knows `owner/name`."""
    folder = tmp_path / "scratch"
    shutil.copytree(stand_ins, folder, copy_function=os.link)
    files = {"model.safetensors": "taew2_2.safetensors", "old/taew2_1.safetensors": "lighttaew2_1.safetensors"}
    hub.repos["owner/name"] = {name: (folder / file).read_bytes() for name, file in files.items()}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("block", runnable("bash"))
def test_the_commands_run(block: Block, scratch: Path) -> None:
    if re.search("--to (?:onnx|web)", block.text):
        pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    for command in (command for command in block.commands() if not why_not(command)):
        words = small_command(command, scratch)
        if words[0] == "tinyvae":
            assert run(words[1:]) == 0, f"{block.name}: {shlex.join(words)}"
        else:
            assert words[0] == "python", f"{block.name}: run `{command}` here, or say in CANNOT why not"
            subprocess.run([sys.executable, *words[1:]], check=True, timeout=HANGS_S)


def small_command(command: str, scratch: Path) -> list[str]:
    """The words of a command of the documents, with stand-ins for its files and options that make it small."""
    for pattern, small in SUBSTITUTIONS.items():
        command = re.sub(pattern, small, command)
    words = shlex.split(command)
    added = OPTIONS.get(words[1], {}) if words[0] == "tinyvae" else {}
    said = flags_in(command)
    if added is SMALL_RUN and any("h100" in word for word in words):
        write_teacher(scratch / "teacher")
        write_lpips(scratch / "lpips.safetensors")
        added = SMALL_RUN | SMALL_TEACHER
    elif added is SMALL_RUN and "wan_teacher" in words:
        added = SMALL_RUN | {"n_frames": "9"}
    elif added is SMALL_RUN and words[2].endswith(".py"):
        added = SMALL_RUN | {"data_root": "videos"}  # settings files name a folder of their author
    if "resolutions" in said:
        said |= {"height", "width", "n_frames"}
    return [*words, *(word for key, value in added.items() if key not in said for word in (f"--{key}", value))]


PYTHON_SUBSTITUTIONS = {
    '"cuda"': '"cpu"',
    "height=480, width=720, n_frames=16": "height=32, width=32, n_frames=8",
    "num_workers=8": "num_workers=0",
    "for batch in loader:": "for batch in [next(iter(loader))]:",
    '"videos/val"': '"videos", max_clips=2',
    'export("output/my_run"': 'export("output/full_run"',
    "output/my_student": "output/small_student",
    '"/models/Wan2.1/vae")': '"wan_teacher", size=(32, 32), max_frames=9)',
    "max_frames=49": "size=(32, 32), max_frames=9",
}


@pytest.mark.parametrize("block", runnable("python"))
def test_the_python_runs(block: Block, scratch: Path) -> None:
    code = block.text
    for theirs, small in PYTHON_SUBSTITUTIONS.items():
        code = code.replace(theirs, small)
    frames = torch.rand(1, 9, 3, 32, 32)
    known = {"frames_NTCHW": frames, "frames": frames, "model": TAEHV("taew2_2", width=0.125)}
    known |= {"load_model": load_model, "save_model": save_model}  # later blocks of a page import nothing again
    exec(compile(code, block.name, "exec"), known)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_commands_stand_in_bash_blocks(page: Path) -> None:
    """A block without a language would not run here. It may show a synopsis (`[--key value]`) or what is printed."""
    for kind, body in FENCE.findall(page.read_text()):
        for line in body.splitlines() if not kind else ():
            assert not re.match(r"(tinyvae|python|pip|pytest) (?!.*\[)", line), f"{page.name}: mark `{line}` as bash"


def test_each_reason_is_needed() -> None:
    code = [unit for block in BLOCKS for unit in units(block)]
    for pattern in CANNOT:
        assert any(re.search(pattern, unit) for unit in code), f"nothing in the documents needs {pattern}"
    assert {(block.page.name, block.kind) for block in BLOCKS} >= set(RUN_ELSEWHERE)
    assert len(BLOCKS) > 40, "the search finds the blocks"

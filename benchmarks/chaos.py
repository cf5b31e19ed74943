"""Break a small run in every way a cluster does, and compare what comes out with a run that nothing happened to.

    python benchmarks/chaos.py --kills 100 --terms 50 --faults 100 --disk-full --cost --write docs/reliability.md

Pieces may be run one by one. Only with --write are they kept: in --results, from which the table in --write is made.
The parent imports everything once and forks each run, so a start costs what a run's own start costs.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tinyvae.cli.main import main as tinyvae
from tinyvae.config.load import load_config
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.training import checkpoint, start
from tinyvae.training.engine import Engine
from tinyvae.training.loop import Trainer
from tinyvae.training.task import StepLosses, TrainingTask

TIMINGS = {"training_s", "seconds", "train/frames_per_second", "train/gpu_memory_gb", "timestamp"}
LONGEST_S = 6.0
"""A kill comes within this time after the start, also where a busy machine made the first start slow."""
BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"

SMALL = {
    "use_sample_clips": False,
    "model_width": 0.125,
    "height": 32,
    "width": 32,
    "n_frames": 4,
    "train_batch_size": 2,
    "max_train_steps": 1_000_000,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "validation_steps": 7,
    "num_validation_samples": 2,
    "save_validation_videos": False,
    "checkpointing_steps": 2,
    "log_every": 1,
    "report_to": "none",
    "report": False,
    "dataloader_num_workers": 0,
    "nccl_timeout": 120,
}
SERAENA = {"use_seraena": True, "seraena_loss_weight": 0.1, "n_seraena_frames": 4, "seraena_buffer_mb": 1}


# runs in forked processes


@dataclass
class Ranks:
    """The processes of one start, and their logs."""

    pids: list[int]
    logs: list[Path]
    codes: dict[int, int] = field(default_factory=dict)

    def poll(self) -> bool:
        """Whether all have ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes; a hang ends the benchmark, with the logs."""
        deadline = time.monotonic() + timeout_s
        while not self.poll():
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise SystemExit(f"HANG after {timeout_s} s\n{self.text()}")
            time.sleep(0.005)
        return [self.codes[rank] for rank in range(len(self.pids))]

    def signal(self, number: int) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                os.kill(pid, number)

    def end(self) -> None:
        """Nothing that this script has started outlives it."""
        if not self.poll():
            self.signal(signal.SIGKILL)

    def text(self) -> str:
        return "\n".join(f"--- rank {rank}\n{log.read_text()}" for rank, log in enumerate(self.logs))


def fork_run(
    words: list[str], logs: Path, *, ranks: int = 1, prepare: Callable[[int], None] = lambda rank: None
) -> Ranks:
    """``tinyvae train`` in forked processes; ``prepare(rank)`` is called in each first."""
    logs.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = [logs / f"rank_{rank}.log" for rank in range(ranks)]
    pids = []
    for rank in range(ranks):
        files[rank].write_text("")
        pid = os.fork()
        if pid == 0:
            _child(words, files[rank], rank, ranks, port, prepare)
        pids.append(pid)
    started = Ranks(pids=pids, logs=files)
    atexit.register(started.end)
    return started


def _child(words: list[str], log_file: Path, rank: int, ranks: int, port: int, prepare: Callable[[int], None]) -> None:
    code: object = 1
    try:
        log = os.open(log_file, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        prepare(rank)
        tinyvae(["train", "quickstart", *words])
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def words_for(run: Path, clips: Path, **changes: object) -> list[str]:
    settings = {**SMALL, "data_root": clips, "output_dir": run, **changes}
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.items()}
    return [word for key, text in texts.items() for word in (f"--{key}", text)]


# comparing


def newest(run: Path) -> Path:
    folder, faults = checkpoint.newest_intact([run])
    assert folder is not None and not faults, f"no intact checkpoint, or damaged ones: {faults}"
    return folder


def step_of(folder: Path) -> int:
    return int(checkpoint.read_manifest(folder)["step"])


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Where two nested structures differ by a single bit, timings apart."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) else [place]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if set(a) != set(b):
            return [f"{place}: other keys"]
        return [found for key in a if key not in TIMINGS for found in differences(a[key], b[key], f"{place}/{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{place}: {len(a)} and {len(b)} items"]
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in differences(x, y, f"{place}/{i}")]
    return [] if a == b or (a != a and b != b) else [f"{place}: {a!r} and {b!r}"]


def compare_runs(disturbed: Path, undisturbed: Path, *, with_log: bool) -> list[str]:
    """Differences of the final checkpoints (all state of all ranks), and of the metric lines and the history."""
    found = []
    for file in sorted(newest(undisturbed).glob("*.pt")):
        both = [torch.load(newest(run) / file.name, weights_only=True) for run in (disturbed, undisturbed)]
        found += differences(both[0], both[1], file.name)
    if with_log:
        for name in ("metrics.jsonl", "validation_history.json"):
            texts = [(run / name).read_text() for run in (disturbed, undisturbed)]
            lists = [json.loads(t) if name.endswith("json") else [json.loads(x) for x in t.splitlines()] for t in texts]
            found += differences(lists[0], lists[1], name)
    return found


def finish_and_compare(
    run: Path, clips: Path, work: Path, *, with_log: bool = True, **changes: object
) -> tuple[int, list[str]]:
    """Train on to a few steps after the last checkpoint; the same steps undisturbed; where the two differ."""
    last = step_of(newest(run)) + 3
    changes = {**changes, "max_train_steps": last}
    words = words_for(run, clips, resume_from_checkpoint="latest", **changes)
    ended = fork_run(words, work / "finish")
    assert ended.wait(600) == [0], ended.text()
    calm = fork_run(words_for(work / "undisturbed", clips, **changes), work / "calm")
    assert calm.wait(3600) == [0], calm.text()
    return last, compare_runs(run, work / "undisturbed", with_log=with_log)


def first_checkpoint(run: Path, clips: Path, work: Path, **changes: object) -> float:
    """Have something to resume: the seconds until the first checkpoint of a resumed run, from start to save."""
    fresh = fork_run(words_for(run, clips, **{**changes, "checkpointing_steps": 2}), work / "first")
    _wait_for(fresh, "checkpoint-2\n")
    fresh.signal(signal.SIGKILL)
    fresh.wait(30)
    started = time.monotonic()
    words = words_for(run, clips, resume_from_checkpoint="latest", **{**changes, "checkpointing_steps": 1})
    again = fork_run(words, work / "second")
    _wait_for(again, "saved")
    seconds = time.monotonic() - started
    again.signal(signal.SIGKILL)
    again.wait(30)
    return seconds


# the pieces


def kills(count: int, work: Path, clips: Path, chance: random.Random, **changes: object) -> dict[str, Any]:
    """kill -9 at random moments, each followed by ``--resume latest``."""
    run = work / "run"
    longest = min(LONGEST_S, 2 * first_checkpoint(run, clips, work, **changes))
    where = {"in start-up": 0, "in a save": 0, "elsewhere in the loop": 0}
    reached = []
    for number in range(count):
        ranks = fork_run(words_for(run, clips, resume_from_checkpoint="latest", **changes), work / "killed")
        time.sleep(chance.uniform(0, longest))
        assert not ranks.poll(), f"kill {number}: the run had ended by itself\n{ranks.text()}"
        ranks.signal(signal.SIGKILL)
        ranks.wait(30)
        in_save = any(entry.name.startswith(checkpoint.UNFINISHED) for entry in run.iterdir())
        in_loop = "resumed from" in ranks.text()
        where["in a save" if in_save else "elsewhere in the loop" if in_loop else "in start-up"] += 1
        reached.append(step_of(newest(run)))
        assert reached == sorted(reached), "a resume went back"
    last, found = finish_and_compare(run, clips, work, **changes)
    return {"kills": count, **where, "steps": last, "differences": found}


def terms(count: int, work: Path, clips: Path, chance: random.Random) -> dict[str, Any]:
    """SIGTERM at random moments, with no other checkpoints: each must leave one of the last step that was done."""
    run, changes = work / "run", {"checkpointing_steps": 0}
    longest = 0.5 * first_checkpoint(run, clips, work, **changes)
    lost, codes, before_first = 0, set(), 0
    for number in range(count):
        ranks = fork_run(words_for(run, clips, resume_from_checkpoint="latest", **changes), work / "stopped")
        # before it has its handlers a signal just ends it
        _wait_for(ranks, "run folder" if number % 5 == 0 else "resumed from")
        time.sleep(chance.uniform(0, longest))
        ranks.signal(signal.SIGTERM)
        codes |= set(ranks.wait(120))
        done = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        lost += max(done) - step_of(newest(run))
        before_first += "before the first step" in ranks.text()
    last, found = finish_and_compare(run, clips, work, **changes)
    result = {"SIGTERMs": count, "exit codes": sorted(codes), "before the first step": before_first}
    return {**result, "lost steps": lost, "steps": last, "differences": found}


class Faults:
    """A NaN on one rank and an out-of-memory error on the other in every ``every`` steps, each once."""

    def __init__(self, every: int, folder: Path) -> None:
        self.every, self.folder = every, folder

    def __call__(self, rank: int) -> None:
        now = {"step": -1}
        losses, step, close = TrainingTask.losses, Trainer.step, Engine.close

        def step_with_number(trainer: Trainer, clips: Any) -> Any:
            now["step"] = trainer.progress.step
            return step(trainer, clips)

        def faulty(task: TrainingTask, frames: torch.Tensor, **options: Any) -> StepLosses:
            place, turn = now["step"] % self.every, now["step"] // self.every % 2
            if place == self.every // 4 and rank == turn:
                result = losses(task, frames, **options)
                return StepLosses(total=result.total * float("nan"), logged=result.logged)
            mark = self.folder / f"oom_{now['step']}"
            if place == 3 * self.every // 4 and rank != turn and not mark.exists():
                mark.touch()
                raise torch.OutOfMemoryError("injected")
            return losses(task, frames, **options)

        def close_and_keep(engine: Engine) -> None:
            torch.save(self.seen.state_dict(), self.folder / f"weights_of_rank_{rank}.pt")
            close(engine)

        build = start.build_task

        def build_and_see(config: Any, engine: Any, model: Any, **options: Any) -> Any:
            self.seen = model
            return build(config, engine, model, **options)

        Trainer.step, TrainingTask.losses = step_with_number, faulty  # type: ignore[method-assign]
        Engine.close, start.build_task = close_and_keep, build_and_see  # type: ignore


def faults(steps: int, work: Path, clips: Path, **changes: object) -> dict[str, Any]:
    """Two ranks. When not even one clip "fits" any more they stop with a checkpoint, and are resumed."""
    run, every = work / "run", 20
    inject = Faults(every, work)
    changes = {"max_train_steps": steps, "validation_steps": every, "checkpointing_steps": 0, **changes}
    stops, resume = 0, {}
    while True:
        ranks = fork_run(words_for(run, clips, **changes, **resume), work / f"start_{stops}", ranks=2, prepare=inject)
        codes = ranks.wait(1200)
        if codes == [0, 0]:
            break
        assert codes == [2, 2] and "single clip" in ranks.text(), ranks.text()
        stops, resume = stops + 1, {"resume_from_checkpoint": "latest"}
    weights = [torch.load(work / f"weights_of_rank_{rank}.pt", weights_only=True) for rank in (0, 1)]
    progress = torch.load(newest(run) / checkpoint.SHARED_STATE, weights_only=True)["progress"]
    return {
        "steps": progress["step"],
        "NaNs": steps // every,
        "steps skipped by both": progress["skipped_steps"],
        "out of memory": len(list(work.glob("oom_*"))),
        "stopped with a checkpoint at one clip, resumed": stops,
        "hangs": 0,
        "differences": differences(*weights),
    }


def disk_full(work: Path, clips: Path) -> dict[str, Any]:
    """A real file system of 24 MB that fills up: once for two saves, once for good."""
    room = work / "disk"
    room.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(room)], capture_output=True)
    if mounted.returncode:
        raise SystemExit(f"--disk-full needs the right to mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        run, ballast = room / "run", room / "ballast"
        ranks = fork_run(words_for(run, clips, max_train_steps=400), work / "full")
        _wait_for(ranks, "checkpoint-6\n")
        _fill(ballast)
        _wait_for(ranks, "(2 of 3)")
        ballast.unlink()
        failed_once = ranks.text().count("COULD NOT SAVE")
        saved_before = step_of(newest(run))
        _wait_for(ranks, f"checkpoint-{saved_before + 12}\n")
        _fill(ballast)
        codes = ranks.wait(300)
        kept = step_of(newest(run))
        ballast.unlink()
        last, found = finish_and_compare(run, clips, work, with_log=False)  # a full disk takes no metric lines
        text = ranks.text()
        assert "3 saves in a row failed" in text and "Traceback" not in text.split("Logging error")[0], text
        return {
            "failed saves survived": failed_once,
            "exit code after three in a row": codes[0],
            "intact then": f"checkpoint-{kept}",
            "steps": last,
            "differences": found,
        }
    finally:
        subprocess.run(["umount", str(room)], check=True)


def _wait_for(ranks: Ranks, text: str) -> None:
    deadline = time.monotonic() + 300
    while text not in ranks.text():
        assert not ranks.poll() and time.monotonic() < deadline, f"never said {text!r}\n{ranks.text()}"
        time.sleep(0.002)


def _fill(ballast: Path) -> None:
    """Leave half a megabyte: a save begins and does not end."""
    free = shutil.disk_usage(ballast.parent).free
    with ballast.open("wb") as stream:
        stream.write(b"\0" * max(0, free - 2**19))


def cost(work: Path, clips: Path) -> dict[str, Any]:
    """Seconds of a step and of a save of the quickstart preset, and how fast state goes to disk here."""
    preset = load_config("quickstart", []).config
    words = ["--data_root", str(clips), "--output_dir", str(work / "run"), "--max_train_steps", "30"]
    words += ["--checkpointing_steps", "10", "--validation_steps", "0", "--report", "false", "--log_every", "10"]
    times: Path = work / "save_seconds"

    def measure(rank: int) -> None:
        save = checkpoint.CheckpointWriter.save

        def timed(writer: Any, **what: Any) -> Any:
            started = time.perf_counter()
            result = save(writer, **what)
            with times.open("a") as stream:
                stream.write(f"{time.perf_counter() - started}\n")
            return result

        checkpoint.CheckpointWriter.save = timed  # type: ignore[method-assign]

    done = fork_run(words, work / "cost", prepare=measure)
    assert done.wait(900) == [0], done.text()
    state = torch.load(newest(work / "run") / checkpoint.SHARED_STATE, weights_only=True)
    step_s = state["progress"]["training_s"] / state["progress"]["step"]
    save_s = sorted(float(line) for line in times.read_text().splitlines())[1]
    big = {"values": torch.rand(64 * 2**20)}
    started = time.perf_counter()
    facts = checkpoint._write_state(work / "big.pt", big)
    mb_per_s = facts["bytes"] / 2**20 / (time.perf_counter() - started)
    (work / "big.pt").unlink()
    return {
        "step_s": step_s,
        "save_s": save_s,
        "interval": preset.checkpointing_steps,
        "share": save_s / (save_s + preset.checkpointing_steps * step_s),
        "write_mb_per_s": mb_per_s,
    }


# results


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kills": lambda r: (
        f"| {r['kills']} x `kill -9`, then `--resume latest` | {r['kills']} intact resumes ({r['in a save']} kills "
        f"fell into a save, {r['in start-up']} into start-up); all state of {r['steps']} steps compared: "
        f"**{len(r['differences'])} differences** |"
    ),
    "terms": lambda r: (
        f"| {r['SIGTERMs']} x SIGTERM ({r['before the first step']} before the first step), no other checkpoints | "
        f"exit codes {r['exit codes']}, **{r['lost steps']} lost steps**; all state of {r['steps']} steps compared: "
        f"**{len(r['differences'])} differences** |"
    ),
    "faults": lambda r: (
        f"| two ranks, {r['NaNs']} NaNs and {r['out of memory']} out-of-memory errors in {r['steps']} steps, each on "
        f"one rank | {r['hangs']} hangs, {r['steps skipped by both']} steps skipped by both, stopped "
        f"with a checkpoint and resumed {r['stopped with a checkpoint at one clip, resumed']} times; weights of the "
        f"two ranks: **{len(r['differences'])} differences** |"
    ),
    "disk_full": lambda r: (
        f"| a full disk in the middle of a save | {r['failed saves survived']} failed saves survived; after three in a "
        f"row exit code {r['exit code after three in a row']} with {r['intact then']} intact; resumed, all state of "
        f"{r['steps']} steps compared: **{len(r['differences'])} differences** |"
    ),
}


def render(results: dict[str, Any]) -> str:
    lines = ["| what happened | what came of it |", "|---|---|"]
    for name, result in results.items():
        kind = name.removesuffix("_seraena")
        if kind in ROWS:
            row = ROWS[kind](result["result"])
            lines.append(row.replace("| ", "| with Seraena: ", 1) if kind != name else row)
    lines += ["", "| piece | date | seconds | command |", "|---|---|---|---|"]
    for name, result in results.items():
        lines.append(f"| {name} | {result['date']} | {result['seconds']:.0f} | `{result['command']}` |")
    machine = f"{os.cpu_count()} CPU cores (shared), {platform.system()}, Python {platform.python_version()}"
    return "\n".join([*lines, "", f"Machine: {machine}, torch {torch.__version__}, gloo."])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--kills-seraena", type=int, default=0)
    parser.add_argument("--terms", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0, metavar="STEPS")
    parser.add_argument("--faults-seraena", type=int, default=0, metavar="STEPS")
    parser.add_argument("--disk-full", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("chaos_work"), help="scratch folder, emptied first")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/chaos.json"))
    parser.add_argument("--write", type=Path, help="keep the results, and put them into this Markdown file")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    shutil.rmtree(given.work, ignore_errors=True)
    clips = given.work.absolute() / "clips"
    write_sample_clips(clips)
    chance = random.Random(given.seed)
    work = given.work.absolute()
    pieces: dict[str, tuple[bool, Callable[[Path], dict[str, Any]], str]] = {
        "kills": (given.kills > 0, lambda w: kills(given.kills, w, clips, chance), f"--kills {given.kills}"),
        "kills_seraena": (
            given.kills_seraena > 0,
            lambda w: kills(given.kills_seraena, w, clips, chance, **SERAENA),
            f"--kills-seraena {given.kills_seraena}",
        ),
        "terms": (given.terms > 0, lambda w: terms(given.terms, w, clips, chance), f"--terms {given.terms}"),
        "faults": (
            given.faults > 0,
            lambda w: faults(given.faults, w, clips, train_batch_size=4),
            f"--faults {given.faults}",
        ),
        "faults_seraena": (
            given.faults_seraena > 0,
            lambda w: faults(given.faults_seraena, w, clips, **SERAENA),
            f"--faults-seraena {given.faults_seraena}",
        ),
        "disk_full": (given.disk_full, lambda w: disk_full(w, clips), "--disk-full"),
        "cost": (given.cost, lambda w: cost(w, clips), "--cost"),
    }
    results = json.loads(given.results.read_text()) if given.results.exists() else {}
    for name, (wanted, piece, option) in pieces.items():
        if not wanted:
            continue
        started = time.monotonic()
        folder = work / name
        folder.mkdir(parents=True)
        result = piece(folder)
        seconds = time.monotonic() - started
        print(f"{name} ({seconds:.0f} s): {json.dumps(result)}", flush=True)
        command = f"python benchmarks/chaos.py {option} --seed {given.seed}"
        results[name] = {"result": result, "seconds": seconds, "date": time.strftime("%Y-%m-%d"), "command": command}
        if given.write is not None:
            given.results.parent.mkdir(parents=True, exist_ok=True)
            given.results.write_text(json.dumps(results, indent=1) + "\n")
        assert not result.get("differences"), result["differences"][:10]
    if given.write is not None:
        text = given.write.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        given.write.write_text(f"{before}{BEGIN}\n{render(results)}\n{END}{after}")
        print(f"kept in {given.results} and {given.write}")
    else:
        print(f"{given.results} is as it was; --write docs/reliability.md keeps these results")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()

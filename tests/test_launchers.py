"""The shell launchers: what they start, told by stubs on PATH. tests/test_launchers_real.py has real starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import HANGS_S, wait_until

ROOT = Path(__file__).resolve().parents[1]
H100, FRONT, RECOVERY = (ROOT / name for name in ("train_taehv_h100.sh", "train_taehv.sh", "auto_recovery_train.sh"))

STUB = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0")" "$@" > "$STUB_RECORD/$(basename "$0").$(ls "$STUB_RECORD" | wc -l)"
env > "$STUB_RECORD/environment"
exit "${STUB_EXIT:-0}"
"""

PYTHON_STUB = """#!/usr/bin/env bash
if [[ "$*" == *" check "* ]]; then exit "${STUB_CHECK_EXIT:-0}"; fi
""" + STUB.split("\n", 1)[1]

SMI_STUB = """#!/usr/bin/env bash
for i in $(seq "${STUB_GPUS:-8}"); do echo "GPU $i: stub"; done
"""


class Stubs:
    """A PATH on which accelerate, python and nvidia-smi only write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.record, bin_folder = folder / "record", folder / "bin"
        self.record.mkdir()
        bin_folder.mkdir()
        for name, text in (("accelerate", STUB), ("python", PYTHON_STUB), ("nvidia-smi", SMI_STUB)):
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)
        kept = ("HOME", "TMPDIR", "LANG")
        self.env = {key: os.environ[key] for key in kept if key in os.environ}
        self.env |= {"PATH": f"{bin_folder}:/usr/bin:/bin", "STUB_RECORD": str(self.record)}
        self.folder = folder

    def run(self, script: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        for file in self.record.iterdir():
            file.unlink()
        return subprocess.run(
            [str(script), *words], env={**self.env, **env}, cwd=self.folder, capture_output=True, text=True, check=False
        )

    def call(self) -> list[str]:
        """The words of the one call that would have trained."""
        (file,) = (f for f in self.record.iterdir() if f.name != "environment")
        return file.read_text().splitlines()

    def environment(self) -> dict[str, str]:
        lines = (self.record / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


def option(call: list[str], name: str) -> str:
    return call[call.index(name) + 1]


@pytest.mark.parametrize(
    ("words", "processes", "preset"),
    [
        (["1", "1gpu_h100"], 1, "1gpu_h100"),
        (["1", "h100"], 1, "h100"),
        (["4", "test"], 4, "test"),
        (["8", "h100"], 8, "h100"),
        (["8", "a800"], 8, "a800"),
        (["16", "h100"], 16, "16gpu_h100"),
    ],
)
def test_each_documented_start_starts_what_it_says(stubs: Stubs, words: list[str], processes: int, preset: str) -> None:
    done = stubs.run(H100, *words, "--resume", "latest", STUB_GPUS=words[0])
    assert done.returncode == 0, done.stderr
    call = stubs.call()
    assert call[call.index("train") - 2 : call.index("train") + 2] == ["-m", "tinyvae", "train", preset]
    assert option(call, "--resume") == "latest"
    if processes == 1:
        assert call[0] == "python"
    else:
        assert call[:5] == ["python", "-m", "tinyvae.training.launch", "accelerate", "launch"]
        assert option(call, "--num_processes") == str(processes)
        assert option(call, "--num_machines") == "1" and "--main_process_ip" not in call
        assert option(call, "--config_file") == str(ROOT / "accelerate_configs/ddp_8gpu.yaml")


def test_custom_takes_a_file_and_settings_pass_through(stubs: Stubs) -> None:
    (stubs.folder / "my settings.py").write_text("")
    done = stubs.run(H100, "8", "custom", "my settings.py", "--learning_rate", "1e-3", "--profile")
    assert done.returncode == 0, done.stderr
    call = stubs.call()
    assert call[call.index("train") + 1 :] == [
        "my settings.py", "--learning_rate", "1e-3", "--enable_profiler", "true",
    ]  # fmt: skip


@pytest.mark.parametrize("node", ["0", "1"])
def test_two_machines_by_environment(stubs: Stubs, node: str) -> None:
    done = stubs.run(H100, "8", "h100", MASTER_ADDR="node1", RANK=node, MASTER_PORT="31000")
    assert done.returncode == 0, done.stderr
    call = stubs.call()
    assert option(call, "--num_processes") == "16" and option(call, "--num_machines") == "2"
    assert option(call, "--machine_rank") == node and option(call, "--main_process_ip") == "node1"
    assert option(call, "--main_process_port") == "31000" and option(call, "train") == "16gpu_h100"
    assert "RANK" not in stubs.environment()
    three = stubs.run(H100, "8", "h100", MASTER_ADDR="node1", RANK="2", NNODES="3")
    assert three.returncode == 0 and option(stubs.call(), "--num_processes") == "24"


def test_the_engine_is_chosen_by_the_launch_file_alone(stubs: Stubs) -> None:
    for gpus, name in (("1", "deepspeed_1gpu"), ("8", "deepspeed_8gpu"), ("16", "deepspeed_16gpu")):
        assert stubs.run(H100, gpus, "a800", ENGINE="deepspeed", STUB_GPUS="16").returncode == 0
        assert option(stubs.call(), "--config_file").endswith(f"accelerate_configs/{name}.yaml")
    (stubs.folder / "own.yaml").write_text("")
    assert stubs.run(H100, "2", "a800", LAUNCH_CONFIG="own.yaml").returncode == 0
    assert option(stubs.call(), "--config_file") == str(stubs.folder / "own.yaml")


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (["eight", "h100"], {}, "GPUS must be a whole number"),
        (["8", "custom"], {}, "custom needs a settings file"),
        (["8", "h100", "--resume"], {}, "--resume needs a checkpoint"),
        (["8", "h100"], {"STUB_GPUS": "4"}, "8 GPUs were asked for and 4 are visible"),
        (["8", "h100"], {"STUB_GPUS": "0"}, "no GPU is visible"),
        (["8", "h100"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "2 are visible"),
        (["8", "h100"], {"MASTER_ADDR": "node1"}, "RANK must be this machine's number from 0 to 1"),
        (["8", "h100"], {"MASTER_ADDR": "node1", "RANK": "2"}, "RANK must be"),
        (["8", "h100"], {"MASTER_PORT": "abc"}, "MASTER_PORT must be a number, not 'abc'"),
        (["8", "h100"], {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        (["8", "h100"], {"ENGINE": "horovod"}, "ENGINE must be ddp or deepspeed"),
    ],
)
def test_mistakes_end_with_2_and_a_sentence_and_start_nothing(
    stubs: Stubs, words: list[str], env: dict[str, str], says: str
) -> None:
    done = stubs.run(H100, *words, **env)
    assert done.returncode == 2 and says in done.stderr and not list(stubs.record.iterdir())


def test_a_failed_quick_check_starts_nothing(stubs: Stubs) -> None:
    done = stubs.run(H100, "8", "h100", STUB_CHECK_EXIT="2")
    assert done.returncode == 2 and not list(stubs.record.iterdir())


def test_a_settings_file_of_the_old_trainer_is_answered_with_its_preset(tmp_path: Path) -> None:
    words = [str(H100), "1", "custom", "training/configs/taehv_config_a800_fixed.py"]
    environment = {**os.environ, "USE_CPU": "1", "PYTHON": sys.executable}
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "the preset a800" in done.stderr, done.stderr


def test_help_needs_no_words_and_no_gpu(stubs: Stubs) -> None:
    for script in (H100, FRONT, RECOVERY):
        done = stubs.run(script, "--help", STUB_GPUS="0")
        assert done.returncode == 0 and "usage: ./" + script.name in done.stdout
        starts = [line for line in done.stdout.splitlines() if re.match(r" +(\w+=\S+ )*\./|example:", line)]
        assert starts and all("--data_root" in line for line in starts if line.split()[-1] != "./train_taehv.sh")
    assert stubs.run(H100).returncode == 2


def test_nccl_defaults_give_way_to_the_users_environment(stubs: Stubs) -> None:
    stubs.run(H100, "8", "h100", "--debug", NCCL_SOCKET_NTHREADS="8", NCCL_IB_DISABLE="1")
    env = stubs.environment()
    assert env["NCCL_SOCKET_NTHREADS"] == "8" and env["NCCL_IB_DISABLE"] == "1"
    assert env["NCCL_P2P_DISABLE"] == "0" and env["NCCL_BUFFSIZE"] == "8388608" and env["NCCL_DEBUG"] == "INFO"
    assert option(stubs.call(), "--debug") == "true", "the run tells of its first step too"
    assert {"SIGUSR1", "SIGHUP"} <= set(env["PET_SIGNALS_TO_HANDLE"].split(",")) and int(
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    ) > 30
    stubs.run(H100, "8", "h100")
    assert "NCCL_DEBUG" not in stubs.environment()


def test_no_colour_unless_on_a_terminal(stubs: Stubs) -> None:
    import pty

    assert "\x1b[" not in stubs.run(H100, "8", "h100").stderr
    leader, follower = pty.openpty()
    subprocess.run([str(H100), "8", "h100"], env=stubs.env, stderr=follower, cwd=stubs.folder, check=True)
    os.close(follower)
    assert b"\x1b[1m" in os.read(leader, 65536)
    os.close(leader)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_environment_hides_are_not_counted(stubs: Stubs, hidden: str) -> None:
    done = stubs.run(H100, "8", "h100", CUDA_VISIBLE_DEVICES=hidden, STUB_GPUS="8")
    assert done.returncode == 2 and "no GPU is visible" in done.stderr and "USE_CPU" not in done.stderr
    assert "./train_taehv.sh quickstart" in done.stderr and "check h100 --no_step --data_root" in done.stderr
    assert stubs.run(FRONT, CUDA_VISIBLE_DEVICES=hidden, STUB_GPUS="8").returncode == 0
    assert stubs.call()[:1] == ["python"], "the CPU"


def test_the_front_door_takes_all_gpus_or_the_cpu(stubs: Stubs) -> None:
    assert stubs.run(FRONT, "scratch", "--seed", "1", STUB_GPUS="4").returncode == 0
    call = stubs.call()
    assert option(call, "--num_processes") == "4" and call[-3:] == ["scratch", "--seed", "1"]
    assert stubs.run(FRONT, STUB_GPUS="0").returncode == 0
    assert stubs.call() == ["python", "-m", "tinyvae", "train", "quickstart"]
    assert stubs.environment()["CUDA_VISIBLE_DEVICES"] == ""
    (stubs.folder / "own.py").write_text("")
    assert stubs.run(FRONT, "own.py", STUB_GPUS="1").returncode == 0
    assert stubs.call()[-1] == "own.py"


# recovery

FAKE_LAUNCHER = """#!/usr/bin/env bash
printf '%s ' "$@" >> "$STUB_RECORD/starts"; echo >> "$STUB_RECORD/starts"
while [[ $# -gt 0 ]]; do [[ "$1" == --output_dir ]] && folder="$2"; shift; done
mkdir -p "$folder"; touch "$folder/config.json"
number="$(wc -l < "$STUB_RECORD/starts")"
bash "$STUB_RECORD/behaviour" "$number" "$folder"
"""


class Recovery:
    """`auto_recovery_train.sh` over a launcher whose behaviour is a few lines of shell ($1 start number, $2 folder)."""

    def __init__(self, folder: Path, behaviour: str) -> None:
        self.folder, self.record = folder, folder / "record"
        self.record.mkdir()
        launcher = folder / "launcher"
        launcher.write_text(FAKE_LAUNCHER)
        launcher.chmod(0o755)
        (self.record / "behaviour").write_text(behaviour)
        self.env = {**os.environ, "TRAIN_LAUNCHER": str(launcher), "STUB_RECORD": str(self.record), "PAUSE_S": "0"}
        self.env |= {"PYTHON": sys.executable, "RUN_DIR": "run"}

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(RECOVERY), *(words or ("2", "h100", "--seed", "1"))],
            env={**self.env, **env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def starts(self) -> list[str]:
        return (self.record / "starts").read_text().splitlines()


def write_checkpoint(folder: Path, step: int) -> str:
    """Shell lines that leave an intact checkpoint (a manifest of one file) in ``$2``."""
    import hashlib

    from tinyvae.training.checkpoint import _hash_of_json

    digest = hashlib.sha256(b"state").hexdigest()
    manifest = {"written_at": f"2026-01-01T00:00:{step:02d}", "files": {"s": {"bytes": 5, "sha256": digest}}}
    source = folder / f"made_{step}"
    source.mkdir()
    (source / "s").write_text("state")
    (source / "manifest.json").write_text(json.dumps({**manifest, "own_sha256": _hash_of_json(manifest)}))
    return f'cp -r "{source}" "$2/checkpoint-{step}"\n'


def test_recovery_goes_on_from_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    lines = write_checkpoint(tmp_path, 5), write_checkpoint(tmp_path, 9)
    broken = 'mkdir "$2/checkpoint-11"; echo "{" > "$2/checkpoint-11/manifest.json"'
    recovery = Recovery(
        tmp_path, f'case "$1" in 1) {lines[0]} exit 1 ;; 2) {lines[1]} {broken}; exit 139 ;; *) exit 0 ;; esac'
    )
    done = recovery.run()
    starts = recovery.starts()
    assert done.returncode == 0 and len(starts) == 3, done.stderr
    assert starts[0].split() == ["2", "h100", "--seed", "1", "--output_dir", "run"]
    assert "--resume run/checkpoint-5 --output_dir run" in starts[1]
    assert "--resume run/checkpoint-9 --output_dir run" in starts[2] and "checkpoint-11" in done.stderr


def test_recovery_gives_up_without_progress_and_never_writes_over_a_dead_run(tmp_path: Path) -> None:
    recovery = Recovery(tmp_path, "exit 7")
    done = recovery.run(MAX_RESTARTS="2")
    assert done.returncode == 7 and "gave up after 2 restarts" in done.stderr
    folders = [start.split()[-1] for start in recovery.starts()]
    assert folders == ["run", "run/attempt_2", "run/attempt_3"]
    assert not any("--resume" in start for start in recovery.starts())


@pytest.mark.parametrize("code", [0, 2])
def test_recovery_does_not_restart_success_or_mistakes(tmp_path: Path, code: int) -> None:
    recovery = Recovery(tmp_path, f"exit {code}")
    assert recovery.run().returncode == code and len(recovery.starts()) == 1


@pytest.mark.parametrize("form", [["--output_dir", "own", "--resume", "a/b"], ["--output_dir=own", "--resume=a/b"]])
def test_recovery_takes_both_forms_of_an_option(tmp_path: Path, form: list[str]) -> None:
    recovery = Recovery(tmp_path, "exit 0")
    done = recovery.run("2", "h100", *form)
    assert done.returncode == 0, done.stderr
    assert recovery.starts()[0].split() == ["2", "h100", "--resume", "a/b", "--output_dir", "own"]


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (["2", "h100", "--resume"], {}, "--resume needs a value"),
        (["2", "h100", "--output_dir", "run_%Y-%m"], {}, "must name one folder, without %Y to %S ('run_%Y-%m')"),
        (["2", "h100"], {"MAX_RESTARTS": "many"}, "MAX_RESTARTS must be a whole number, not 'many'"),
    ],
)
def test_mistakes_to_recovery_start_nothing(tmp_path: Path, words: list[str], env: dict[str, str], says: str) -> None:
    recovery = Recovery(tmp_path, "exit 0")
    done = recovery.run(*words, **env)
    assert done.returncode == 2 and says in done.stderr and not (tmp_path / "record" / "starts").exists()
    assert done.stderr.count("\n") == 1


def test_a_requeued_job_goes_on_by_itself(tmp_path: Path) -> None:
    recovery = Recovery(tmp_path, "exit 0")
    (tmp_path / "run").mkdir()
    subprocess.run(["bash", "-c", write_checkpoint(tmp_path, 3), "_", "1", "run"], cwd=tmp_path, check=True)
    assert recovery.run().returncode == 0
    assert "--resume run/checkpoint-3" in recovery.starts()[0]


def test_a_signal_is_handed_on_and_ends_recovery(tmp_path: Path) -> None:
    behaviour = 'trap "touch $2/told; exit 143" TERM; touch "$2/ready"; while :; do sleep 0.05; done'
    recovery = Recovery(tmp_path, behaviour.replace("$2/told", "run/told"))
    launcher = tmp_path / "launcher"
    launcher.write_text(FAKE_LAUNCHER.replace('bash "$STUB', 'exec bash "$STUB'))
    process = subprocess.Popen([str(RECOVERY), "2", "h100"], env=recovery.env, cwd=tmp_path)
    wait_until(lambda: (tmp_path / "run" / "ready").exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANGS_S) == 143 and (tmp_path / "run" / "told").exists() and len(recovery.starts()) == 1


def test_a_signal_before_the_start_starts_nothing(tmp_path: Path) -> None:
    """While the checkpoints are looked at, nobody is there to hand it on to."""
    recovery = Recovery(tmp_path, "exit 0")
    (tmp_path / "run").mkdir()
    subprocess.run(["bash", "-c", write_checkpoint(tmp_path, 3), "_", "1", "run"], cwd=tmp_path, check=True)
    slow = tmp_path / "slow_python"
    slow.write_text("#!/bin/sh\ntouch looking\nwhile [ ! -e go ]; do sleep 0.05; done\n")
    slow.chmod(0o755)
    process = subprocess.Popen([str(RECOVERY), "2", "h100"], env=recovery.env | {"PYTHON": str(slow)}, cwd=tmp_path)
    wait_until((tmp_path / "looking").exists)
    process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert process.wait(HANGS_S) == 143 and not (tmp_path / "record" / "starts").exists()


def run_slurm_template(folder: Path, *, srun_exit: int) -> subprocess.CompletedProcess[str]:
    stub = folder / "bin"
    stub.mkdir()
    hosts = 'if [ "$1" = show ]; then echo node7; echo node8; else echo "scontrol $*"; fi'
    (stub / "scontrol").write_text(f"#!/bin/sh\n{hosts}\n")
    (stub / "srun").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" "$MASTER_ADDR" "$NNODES" "$RUN_DIR"\nexit {srun_exit}\n'
    )
    for file in stub.iterdir():
        file.chmod(0o755)
    env = {"PATH": f"{stub}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "77"}
    env |= {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    env["SLURM_CPUS_PER_TASK"] = "96"
    words = ["bash", str(ROOT / "slurm" / "train_taehv.sbatch")]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


def test_the_slurm_template_is_valid_shell_and_starts_recovery_on_every_machine(tmp_path: Path) -> None:
    done = run_slurm_template(tmp_path, srun_exit=0)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "--cpus-per-task=96" in lines, "srun does not take it from the job"
    assert "auto_recovery_train.sh" in done.stdout and lines[-7:-3] == ["8", "h100", "--data_root", "/data/videos"]
    assert lines[-3:] == ["node7", "2", f"{tmp_path}/output/slurm_77"]


@pytest.mark.parametrize(("code", "again"), [(128 + signal.SIGUSR1, True), (143, False), (1, False)])
def test_a_slurm_job_queues_again_at_its_time_limit_and_at_nothing_else(tmp_path: Path, code: int, again: bool) -> None:
    done = run_slurm_template(tmp_path, srun_exit=code)
    assert done.returncode == code and ("scontrol requeue 77" in done.stdout) == again
    limit_signal = re.search(r"#SBATCH --signal=(\w+)@", (ROOT / "slurm" / "train_taehv.sbatch").read_text())
    assert limit_signal is not None and limit_signal[1] == "USR1", "what the time limit sends, and scancel does not"

"""Work on a real Ray cluster of several processes and machines: same results, lost workers, and who does not answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.data.ray_workers import KilledOnce, SeesNothing
from tests.data.test_index_build import BAD, crashing_probe
from tests.processes import HANGS_S, wait_until
from tests.video.small_videos import write_video
from tinyvae.cli.main import run
from tinyvae.data import index_build
from tinyvae.data.index_build import build_index
from tinyvae.data.ray_cluster import ray_cluster
from tinyvae.errors import UserError
from tinyvae.video.decode import probe_video

build = partial(build_index, show_progress_bar=False)


@pytest.mark.parametrize("address", ["remote", "host:port", "http://host:1", "host:", "", "[::1"])
def test_what_is_no_address_is_told(tmp_path: Path, address: str) -> None:
    with pytest.raises(UserError, match=r"is no address; use local, auto, HOST:PORT or ray://HOST:PORT"):
        run(["data", "index", str(tmp_path), "--output", str(tmp_path / "i.tvi"), "--ray", address])


def test_missing_ray_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"--ray needs the package 'ray'.*pip install 'tinyvae\[ray\]'"):
        run(["data", "index", str(tmp_path / "gone"), "--output", str(tmp_path / "i.tvi"), "--ray", "local"])


def test_a_cluster_and_no_worker_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--workers 0"):
        run(["data", "index", str(tmp_path), "--output", str(tmp_path / "i.tvi"), "--ray", "local", "--workers", "0"])


def test_a_name_that_no_host_can_have_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(UserError, match=r"no Ray cluster answers at a\.\.b:6379 \(.*\); start one with"):
        run(["data", "index", str(tmp_path), "--output", str(tmp_path / "i.tvi"), "--ray", "a..b:6379"])


@pytest.mark.slow
def test_nobody_answers(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "a.mp4").write_bytes(b"x")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and nobody listens
        for address in (f"127.0.0.1:{free.getsockname()[1]}", f"ray://127.0.0.1:{free.getsockname()[1]}"):
            with pytest.raises(UserError, match=rf"no Ray cluster answers at {address} \(Connection refused\)"):
                build(tmp_path, tmp_path / "i.tvi", ray=address)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of forty videos; one is broken and one is not there."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(38):
        write_video(folder / f"{number:02}.mp4", frames=4 + number % 3, seed=number)
    (folder / "broken.mp4").write_bytes(b"not a video")
    names = [*sorted(file.name for file in folder.iterdir()), "gone.mp4"]
    (folder / "list.jsonl").write_text("".join(json.dumps({"path": name}) + "\n" for name in names))
    return folder / "list.jsonl"


@pytest.mark.slow
def test_the_index_is_that_of_one_process(videos: Path, tmp_path: Path) -> None:
    """Byte for byte, although a worker is killed in the middle."""
    pytest.importorskip("ray")
    build(videos, tmp_path / "alone.tvi", num_workers=0)
    probe = KilledOnce(probe_video, tmp_path / "calls", call=12)
    report = build(videos, tmp_path / "cluster.tvi", num_workers=3, ray="local", probe=probe)
    assert (report.num_probed, report.index.num_bad) == (40, 2)
    assert probe.num_calls > 39, "the killed batch came again"
    assert (tmp_path / "cluster.tvi").read_bytes() == (tmp_path / "alone.tvi").read_bytes()


@pytest.mark.slow
def test_files_that_kill_or_hang_their_process_are_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a machine that does not see the files is named."""
    pytest.importorskip("ray")
    monkeypatch.setattr(index_build, "GRACE_S", 10.0)
    data = tmp_path / "data"
    for name in ("hangs", *range(12)):
        write_video(data / f"{name}.mp4", frames=4, seed=len(str(name)))
    index = build(data, tmp_path / "i.tvi", num_workers=2, ray="local", timeout_s=0.1, probe=crashing_probe).index
    assert {row.path: row.reason for row in index.bad_rows()} == BAD
    with pytest.raises(UserError, match=rf"machine {socket.gethostname()} of the Ray cluster does not see .*\.mp4"):
        build(data, tmp_path / "j.tvi", num_workers=1, ray="local", probe=SeesNothing(probe_video))


class HeldProbe:
    """Leaves a file for each call; those from the tenth on go on when the file ``gate`` is there."""

    def __init__(self, folder: Path, gate: Path) -> None:
        self.calls, self.gate = KilledOnce(probe_video, folder, call=0), gate

    def __call__(self, path: Path, **options: Any) -> Any:
        found = self.calls(path, **options)
        wait_until(lambda: self.calls.num_calls < 10 or self.gate.exists())
        return found


@pytest.fixture
def two_machines() -> Iterator[Any]:
    """A cluster of two machines: two raylets here, each with a core and processes of its own."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.mark.slow
def test_a_machine_that_dies_costs_nothing_but_time(two_machines: Any, videos: Path, tmp_path: Path) -> None:
    build(videos, tmp_path / "alone.tvi", num_workers=0)
    (_, second) = two_machines.list_all_nodes()
    raylet = second.all_processes["raylet"][0].process
    probe = HeldProbe(tmp_path / "calls", tmp_path / "killed")

    def kill_in_the_middle() -> None:
        wait_until(lambda: probe.calls.num_calls >= 10)
        os.kill(raylet.pid, signal.SIGKILL)
        (tmp_path / "killed").touch()

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    build(videos, tmp_path / "cluster.tvi", ray=two_machines.address, probe=probe)
    killer.join()
    raylet.wait(HANGS_S)
    assert (tmp_path / "cluster.tvi").read_bytes() == (tmp_path / "alone.tvi").read_bytes()


@pytest.mark.slow
def test_items_are_taken_as_work_is_finished(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    taken = []
    with ray_cluster("local", num_workers=2) as cluster:
        items = (taken.append(number) or number for number in range(50))
        results = cluster.map(abs, items)
        first, _ = next(results)
        assert len(taken) == 4
        assert {first, *dict(results)} == set(range(50))

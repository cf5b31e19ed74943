"""Work on the machines of a Ray cluster: start or join one, map a function over items, feed actors that hold a model.

Ray moves the work and starts lost work again. This file bounds how much is on its way, and turns Ray's errors into
ours. Every machine needs the same tinyvae and the same storage under the same paths.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tinyvae import __version__
from tinyvae.errors import UserError, require_package

Item = TypeVar("Item")
Part = TypeVar("Part")

RETRIES = 3
"""How often Ray does a piece of work again whose process or machine was lost."""
TASKS_PER_CORE = 2
WAITING_PER_ACTOR = 2
"""Items whose parts are ready, or being made, while an actor works on another one."""
ANSWER_S = 10.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # how often to ask an address that answers but is no cluster; each time 40 s
}
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


class LostWorkError(UserError):
    """Ray lost a piece of work, and gave up."""


def check_address(address: str) -> None:
    """Refuse what no cluster can be reached by: no address, no Ray here, or nobody who answers there."""
    is_name = address in ("local", "auto")
    try:
        place = urlsplit(address if "://" in address else f"//{address}")
        is_whole = place.scheme in ("", "ray") and place.hostname and place.port
    except ValueError:  # a port that is no number, or half of the brackets of IPv6
        is_whole = False
    if not (is_name or is_whole):
        raise UserError(f"--ray {address!r} is no address; use local, auto, HOST:PORT or ray://HOST:PORT")
    _import_ray()
    if not is_name:
        try:
            socket.create_connection((place.hostname, place.port), timeout=ANSWER_S).close()
        except (OSError, UnicodeError) as fault:  # UnicodeError: a name that no host can have
            raise _no_answer(address, getattr(fault, "strerror", None) or str(fault)) from None


@contextmanager
def ray_cluster(address: str, *, num_workers: int | None = None) -> Iterator[Cluster]:
    """Join the cluster at ``address``; ``local`` starts one in this machine, which ends with the block.

    >>> with ray_cluster("local", num_workers=4) as cluster:  # doctest: +SKIP
    ...     sizes = dict(cluster.map(os.path.getsize, files))

    Args:
        address: ``local``, ``auto`` (the cluster that this machine is in), ``HOST:PORT`` or ``ray://HOST:PORT``.
        num_workers: tasks at the same time; default: one per core of the cluster.
    """
    check_address(address)
    ray = _import_ray()
    try:
        if address == "local":
            ray.init("local", num_cpus=num_workers, include_dashboard=False, **QUIET)
        else:
            ray.init(address, **QUIET)
    except (OSError, RuntimeError, ValueError) as fault:
        raise _no_answer(address, str(fault).split(". ")[0].splitlines()[0]) from None
    try:
        owned = ray.cluster_resources()
        num_cores = int(owned.get("CPU", 0))
        if num_cores == 0:
            raise UserError(f"the Ray cluster at {address} offers no CPU; start it with --num-cpus of at least 1")
        yield Cluster(ray=ray, num_tasks=min(num_workers or num_cores, num_cores), num_gpus=int(owned.get("GPU", 0)))
    finally:
        ray.shutdown()


def _import_ray() -> ModuleType:
    os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}  # read at the import
    return require_package("ray", extra="ray", needed_for="--ray")


def _no_answer(address: str, reason: str) -> UserError:
    return UserError(
        f"no Ray cluster answers at {address} ({reason}); start one with `ray start --head`, or use --ray local"
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that this process has joined; ``num_tasks``: how many tasks it runs at the same time for us."""

    ray: ModuleType
    num_tasks: int
    num_gpus: int

    def map(
        self, function: Callable[[Item], Any], items: Iterable[Item], *, again: Callable[[Item], Any] | None = None
    ) -> Iterator[tuple[Item, Any]]:
        """Each item and what ``function`` makes of it, in any order; items are taken as work is finished.

        An item whose process was lost goes to ``again``; without it, to ``function`` again. A `UserError` of a task is
        raised here.
        """
        first = self._task(function, max_retries=RETRIES if again is None else 0)
        second = None if again is None else self._task(again, max_retries=RETRIES)
        return self._results(first, items, self.num_tasks * TASKS_PER_CORE, again=second)

    def feed(
        self,
        prepare: Callable[[Part], Any],
        make_worker: Callable[[], Callable[..., Any]],
        items: Iterable[tuple[Item, Sequence[Part]]],
    ) -> Iterator[tuple[Item, Any]]:
        """Each item and its result, in any order: ``worker(item, prepare(part), prepare(part), ...)``.

        Tasks on all cores prepare the parts. Actors, one per GPU, or one for two cores where there is none, each make
        a worker once and give it the prepared parts, which lie in Ray's object store until then. A killed actor starts
        again and gets its items again; lost parts are prepared again.
        """
        ray = self.ray
        actor_class = ray.remote(
            num_cpus=0,
            num_gpus=1 if self.num_gpus else 0,
            max_restarts=-1,
            max_task_retries=RETRIES,
            scheduling_strategy="SPREAD",
        )(_Actor)
        packed, num_actors = ray.cloudpickle.dumps(make_worker), self.num_gpus or max(1, self.num_tasks // 2)
        actors = [actor_class.remote(packed, os.getcwd()) for _ in range(num_actors)]
        free = deque(actors * (1 + WAITING_PER_ACTOR))  # each as often as it may get one more item
        actor_of: dict[Any, Any] = {}
        prepare_part = self._task(prepare, max_retries=RETRIES)

        def start(item: tuple[Item, Sequence[Part]]) -> Any:
            (key, parts), actor = item, free.popleft()
            result = actor.run.remote(key, *map(prepare_part, parts))
            actor_of[result] = actor
            return result

        def finish(result: Any) -> None:
            free.append(actor_of.pop(result))

        for (key, _), result in self._results(start, items, len(free), finish=finish):
            yield key, result

    def _task(self, function: Callable[..., Any], *, max_retries: int) -> Callable[[Any], Any]:
        remote = self.ray.remote(num_cpus=1, max_retries=max_retries)(_call)
        shared = self.ray.put(self.ray.cloudpickle.dumps(function))  # once, not with every call
        return lambda item: remote.remote(shared, item, os.getcwd(), __version__)

    def _results(
        self,
        start: Callable[[Item], Any],
        items: Iterable[Item],
        limit: int,
        *,
        again: Callable[[Item], Any] | None = None,
        finish: Callable[[Any], None] = lambda result: None,
    ) -> Iterator[tuple[Item, Any]]:
        """Start items, never more than ``limit`` at once, and give the results as they come."""
        stream = iter(items)
        pending: dict[Any, Item] = {}
        lost: set[Any] = set()
        while True:
            for item in islice(stream, limit - len(pending)):
                pending[start(item)] = item
            if not pending:
                return
            (done, *_), _ = self.ray.wait(list(pending))
            item = pending.pop(done)
            finish(done)
            try:
                result = self._get(done)
            except LostWorkError:
                if again is None or done in lost:
                    raise
                retried = again(item)
                pending[retried] = item
                lost.add(retried)
                continue
            yield item, result

    def _get(self, result: Any) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(result)
        except errors.RayTaskError as failed:
            if isinstance(failed.cause, UserError):
                raise failed.cause from None
            if "No module named 'tinyvae" in str(failed):
                raise UserError(
                    f"a machine of the Ray cluster has not tinyvae {__version__}; install it on all"
                ) from None
            raise
        except errors.RayError as lost:
            raise LostWorkError(
                f"the Ray cluster lost a piece of the work and gave up ({str(lost).splitlines()[0]}); look at the "
                "memory and the logs of its machines, then run the same command again: what is done stays"
            ) from None


def _call(packed: bytes, item: Any, folder: str, version: str) -> Any:
    """Runs in a worker."""
    if version != __version__:
        raise UserError(
            f"machine {socket.gethostname()} of the Ray cluster has tinyvae {__version__}, and this command is of "
            f"{version}; install the same version on all machines"
        )
    return _unpack(packed, folder)(item)


class _Actor:
    """Holds a worker, made at the first call: an error there is then told like any other."""

    def __init__(self, packed: bytes, folder: str) -> None:
        self._sent = (packed, folder)
        self._worker: Callable[..., Any] | None = None

    def run(self, item: Any, *parts: Any) -> Any:
        if self._worker is None:
            self._worker = _unpack(*self._sent)()
        return self._worker(item, *parts)


def _unpack(packed: bytes, folder: str) -> Callable[..., Any]:
    """A function that was sent here. What it needs is opened here: Ray itself would wrap a `UserError` of that."""
    if os.path.isdir(folder):
        os.chdir(folder)  # the command's: relative paths then mean the same files
    try:
        return pickle.loads(packed)
    except UserError as mistake:
        raise UserError(f"on machine {socket.gethostname()} of the Ray cluster: {mistake}") from None

"""How the processes of a run work together: the plain engine, on which DeepSpeed's builds.

Between two exchanges a process does only local work. Each one computes the gradients of its own clips; then all
exchange one small status. Only if all are well, one flat all-reduce averages the gradients and the optimizer steps. So
a process that meets a NaN or runs out of memory can say so, and no other process waits for it in a collective that it
never joins. (Why not DistributedDataParallel: docs/decisions.md.)
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training.guards import is_out_of_memory
from tinyvae.training.optim import OptimizerSet

log = logging.getLogger(__name__)
T = TypeVar("T")

LAUNCH_VARIABLES = {"LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}
"""One of these, or one of accelerate's own, is set where a launcher has started the process."""


class PeerLostError(UserError):
    """Another process of this run has stopped, so no further exchange is possible."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """``gradient_norm``: before clipping; not finite where ``stepped`` is False because of the gradients."""

    gradient_norm: float
    stepped: bool


class Engine:
    """One process of a run: who it is, what it exchanges (all processes in the same order), and how it steps."""

    kind = "plain"

    def __init__(self, config: TrainConfig) -> None:
        self.rank, self.world_size, self.device = join_processes(config)
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.is_main = self.rank == 0
        self.many = dist.is_initialized()  # also for one process that a launcher started
        self.timeout_s = config.nccl_timeout
        self._dtype = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}[config.mixed_precision]
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=config.mixed_precision == "fp16")
        self._replays_graphs = config.compile_model and config.compile_mode in ("reduce-overhead", "max-autotune")
        # Small messages travel on a gloo group of their own: they do not wait for the GPU, and a process that died
        # closes its connection, which the others notice at once instead of at the timeout.
        timeout = timedelta(seconds=self.timeout_s)
        self._messages = dist.new_group(backend="gloo", timeout=timeout) if self.many else None

    def worst(self, *codes: int) -> tuple[int, ...]:
        """The largest value of each code over all processes."""
        if not self.many:
            return codes
        values = torch.tensor(codes, dtype=torch.int64)
        with self._exchange("a status"):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._messages)
        return tuple(values.tolist())

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in one exchange per dtype."""
        if not self.many:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # the same order on every rank
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            with self._exchange("gradients"):
                dist.all_reduce(flat)
            flat /= self.world_size
            parts = flat.split([tensor.numel() for tensor in same])
            torch._foreach_copy_(list(same), [p.view(t.shape) for p, t in zip(parts, same, strict=True)])

    def gather(self, item: T) -> list[T]:
        """Every process's item, in rank order, on every process. Small things only: they are pickled."""
        if not self.many:
            return [item]
        items: list[Any] = [None] * self.world_size
        with self._exchange("results"):
            dist.all_gather_object(items, item, group=self._messages)
        return items

    def from_main(self, make: Callable[[], T]) -> T:
        """What ``make`` returns on the main process, on every process; a ``UserError`` there is raised by all."""
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = make()
            except UserError as mistake:
                box[1] = mistake
        if self.many:
            with self._exchange("a decision"):
                dist.broadcast_object_list(box, src=0, group=self._messages)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def barrier(self) -> None:
        self.worst(0)

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except RuntimeError as fault:
            if is_out_of_memory(fault):  # for example inside DeepSpeed's step: no process is lost
                raise
            # gloo and NCCL report a dead or silent peer as a RuntimeError. A bug of ours is one too: keep the cause.
            happened = "has stopped"
            if time.monotonic() - began > 0.9 * self.timeout_s:
                happened = f"has not answered within {self.timeout_s} s (nccl_timeout): it hangs"
            raise PeerLostError(
                f"process {self.rank} could not exchange {what} with the others: another process of this run "
                f"{happened}. Look for its own message above, fix that, and go on with --resume latest. See "
                "docs/troubleshooting.md#a-lost-process"
            ) from fault

    def prepare(self, model: nn.Module, optimizers: OptimizerSet) -> None:
        """Take over a model (already on the device) and its optimizers; all processes start from rank 0's weights."""
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizers = optimizers
        if self.many:
            with self._exchange("the first weights"):
                for value in (*model.parameters(), *model.buffers()):
                    dist.broadcast(value.detach(), src=0)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision the networks run in; losses leave it by themselves."""
        return torch.autocast(self.device.type, dtype=self._dtype) if self._dtype is not None else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one (part of a) micro-batch; the caller has weighted the loss by its share."""
        self._scaler.scale(loss).backward()
        if self._replays_graphs:
            # Every replay of a CUDA graph writes into the same memory: copy these gradients before the next one.
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def discard_gradients(self) -> None:
        self._optimizers.zero_grad()

    def finish_step(self, *, max_grad_norm: float) -> StepResult:
        """Average, clip and apply the gradients. Where they are not finite, no process applies anything."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        assert gradients, "finish_step without a backward pass"
        self.average_(gradients)
        for optimizer in self._optimizers.optimizers:
            self._scaler.unscale_(optimizer)
        limit = max_grad_norm if max_grad_norm > 0 else math.inf
        norm_on_host = nn.utils.clip_grad_norm_(self._parameters, limit).to("cpu", non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        self._optimizers.propose()  # the GPU computes on while the host waits for the norm
        if arrived is not None:
            arrived.synchronize()
        norm = float(norm_on_host)
        # Averaged gradients are the same numbers on every process, so all of them decide alike.
        stepped = math.isfinite(norm)
        if stepped:
            # The scaler would let an optimizer step whose own gradients are finite while another one's are not.
            for optimizer in self._optimizers.optimizers:
                self._scaler.step(optimizer)
        self._scaler.update()
        self._optimizers.zero_grad()
        return StepResult(gradient_norm=norm, stepped=stepped)

    def weights_were_loaded(self) -> None:
        """The model's weights were set from outside (on every process): an engine with a copy updates it."""

    def state_dict(self) -> dict[str, Any]:
        """What the engine itself must remember: optimizer moments and the loss scale."""
        return {"optimizers": self._optimizers.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizers.load_state_dict(state["optimizers"])
        # Fused steps need moments in the memory order of their weights; another engine may save another order.
        for weight, moments in [pair for each in self._optimizers.optimizers for pair in each.state.items()]:
            for name, value in moments.items():
                if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                    moments[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
        if self._scaler.is_enabled() and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def save_collective(self) -> None:
        """Collect what needs all processes at once: DeepSpeed's parts of the optimizer."""

    def close(self) -> None:
        self.barrier()
        self.close_quietly()

    def close_quietly(self) -> None:
        """Leave the process group without waiting: after a failure the others may never answer."""
        if self.many and dist.is_initialized():
            dist.destroy_process_group()


def join_processes(config: TrainConfig) -> tuple[int, int, torch.device]:
    """Join the process group that a launcher describes: this process's rank, how many there are, and its device."""
    if config.deterministic:  # read by cuBLAS and torch.compile when they start
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    on_cpu = not torch.cuda.is_available()
    if any(name in LAUNCH_VARIABLES or name.startswith("ACCELERATE_") for name in os.environ):
        from accelerate import PartialState  # it only numbers processes and names devices

        group: dict[str, Any] = {}
        if int(os.environ.get("LOCAL_RANK", "-1")) >= 0:  # it takes a named backend for a sign of a launched job
            group = {"backend": "gloo" if on_cpu else "nccl", "timeout": timedelta(seconds=config.nccl_timeout)}
        processes = PartialState(cpu=on_cpu, **group)
        seat = processes.process_index, processes.num_processes, processes.device
    else:  # accelerate would say the same, after it has asked nvidia-smi for the names of all GPUs
        seat = 0, 1, torch.device("cpu" if on_cpu else "cuda")
    if not on_cpu:
        torch.backends.cuda.matmul.allow_tf32 = config.allow_tf32
        torch.backends.cudnn.allow_tf32 = config.allow_tf32
        # cuDNN's trials of kernels gained nothing in a compiled step and took 32 GiB (docs/performance.md).
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = config.deterministic
        torch.use_deterministic_algorithms(config.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # all is written first
    return seat


def as_number(norm: Tensor | float | None) -> float:
    """A gradient norm as a float, whatever an engine returned; None (not computed) is not a number."""
    return math.nan if norm is None else float(norm)

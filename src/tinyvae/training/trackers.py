"""Where the curves and pictures of a run go beside ``metrics.jsonl``: TensorBoard, Weights & Biases or MLflow.

A tracker keeps one record for a run. The record's id is in ``tracker.json`` in the run's folder, so that a resumed run
goes on in the same record. (TensorBoard needs no id: its files are in the folder.)
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from tinyvae.config.schema import FIELDS, TrainConfig, shown_value, to_json
from tinyvae.errors import UserError, first_line, require_package
from tinyvae.files import atomic_write
from tinyvae.terminal import in_utf8
from tinyvae.training.pictures import Pictures

TITLES = {"tensorboard": "TensorBoard", "wandb": "wandb", "mlflow": "MLflow"}
RECORD_FILE = "tracker.json"
PROJECT = "tinyvae"  # of wandb, and the experiment of MLflow, where the environment names none


class Tracker(ABC):
    """One record of a run, opened by the main process."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers at a step; names like ``train/loss``."""

    @abstractmethod
    def pictures(self, step: int, drawn: Pictures) -> None:
        """Add input | output | error of a validation clip, as a picture and as an animation."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""


def open_tracker(folder: Path, config: TrainConfig, *, from_step: int) -> Tracker:
    """The tracker that ``report_to`` names. ``folder``: the run's; ``from_step``: where it resumes."""
    kinds: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
    return kinds[config.report_to](folder, config, from_step)


def tracker_failures(report_to: str) -> tuple[type[Exception], ...]:
    """What the calls of a tracker raise where they cannot write."""
    if report_to == "wandb":
        return OSError, _require("wandb").Error
    if report_to == "mlflow":
        return OSError, _require("mlflow").exceptions.MlflowException
    return (OSError,)


def _require(package: str) -> Any:
    return require_package(package, extra=package, needed_for=f"report_to={package}")


class TensorBoard(Tracker):
    """Event files in ``logging_dir``."""

    def __init__(self, folder: Path, config: TrainConfig, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = str(folder / config.logging_dir / config.tracker_name)
        self._writer = SummaryWriter(place, purge_step=from_step + 1 if from_step else None)
        self._writer.add_text("config", f"```json\n{to_json(config)}\n```", from_step)
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings_of(config).items())
        self._writer.add_text("settings", f"| key | value |\n|---|---|\n{rows}", from_step)
        self._writer.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def pictures(self, step: int, drawn: Pictures) -> None:
        # TensorBoard plays GIFs, and its own add_video needs one more package.
        from tensorboard.compat.proto.summary_pb2 import Summary

        size = {"height": drawn.height, "width": drawn.width, "colorspace": 3}
        tagged = {f"val_picture/{drawn.name}": drawn.png, f"val_video/{drawn.name}": drawn.gif}
        values = [
            Summary.Value(tag=tag, image=Summary.Image(**size, encoded_image_string=content))
            for tag, content in tagged.items()
        ]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """A run of Weights & Biases. With ``WANDB_MODE=offline`` it is written to ``logging_dir`` alone."""

    def __init__(self, folder: Path, config: TrainConfig, from_step: int) -> None:
        wandb = self._wandb = _require("wandb")
        place = folder / config.logging_dir
        place.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=config.tracker_name,
                id=read_records(folder).get("wandb") or uuid.uuid4().hex[:8],
                resume="allow",
                dir=place,
                config=settings_of(config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as failure:
            advice = "log in with `wandb login`, set WANDB_MODE=offline, or set report_to to tensorboard"
            raise UserError(f"wandb cannot begin a run ({first_line(failure)}); {advice}.") from None
        # Our own steps are the axis: wandb's would refuse those that a resumed run takes again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        write_record(folder, "wandb", self._run.id)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def pictures(self, step: int, drawn: Pictures) -> None:
        picture = self._wandb.Image(Image.open(io.BytesIO(drawn.png)))
        video = self._wandb.Video(io.BytesIO(drawn.gif), format="gif")
        self._run.log({"step": step, f"val_picture/{drawn.name}": picture, f"val_video/{drawn.name}": video})

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow, on the server that ``MLFLOW_TRACKING_URI`` names, else in a database in ``logging_dir``."""

    def __init__(self, folder: Path, config: TrainConfig, from_step: int) -> None:
        mlflow = self._mlflow = _require("mlflow")
        # A server that is down would otherwise hold up the run for minutes at every line.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        place = (folder / config.logging_dir).absolute()
        place.mkdir(parents=True, exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        address = server or f"sqlite:///{place / 'mlflow.db'}"
        self._artifacts = None if server else (place / "mlflow").as_uri()
        try:
            self._client = mlflow.MlflowClient(tracking_uri=address)
            self._run_id = read_records(folder).get("mlflow") or self._begin_record(folder, config)
            self._client.update_run(self._run_id, status="RUNNING")
        except tracker_failures("mlflow") as failure:
            advice = "check MLFLOW_TRACKING_URI, or set report_to to tensorboard"
            raise UserError(f"MLflow at {address} cannot begin a run ({first_line(failure)}); {advice}.") from None

    def _begin_record(self, folder: Path, config: TrainConfig) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = (
            self._client.create_experiment(name, self._artifacts) if experiment is None else experiment.experiment_id
        )
        run_id = self._client.create_run(number, run_name=config.tracker_name).info.run_id
        params = [self._mlflow.entities.Param(key, value) for key, value in settings_of(config).items()]
        for start in range(0, len(params), 100):  # a server takes no more at once
            self._client.log_batch(run_id, params=params[start : start + 100])
        write_record(folder, "mlflow", run_id)
        return run_id

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def pictures(self, step: int, drawn: Pictures) -> None:
        stem = drawn.name.replace("/", "_")
        with tempfile.TemporaryDirectory() as folder:
            for kind, suffix, content in (("val_picture", "png", drawn.png), ("val_video", "gif", drawn.gif)):
                file = Path(folder) / f"{step}.{suffix}"
                file.write_bytes(content)
                self._client.log_artifact(self._run_id, str(file), f"{kind}/{stem}")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


# what trackers share


def settings_of(config: TrainConfig) -> dict[str, str]:
    return {key: in_utf8(shown_value(getattr(config, key))) for key in FIELDS}


def read_records(folder: Path) -> dict[str, str]:
    """The ids of this run's records, by tracker."""
    file = folder / RECORD_FILE
    return json.loads(file.read_text()) if file.is_file() else {}


def write_record(folder: Path, tracker: str, record: str) -> None:
    with atomic_write(folder / RECORD_FILE, "w") as stream:
        stream.write(json.dumps({**read_records(folder), tracker: record}) + "\n")

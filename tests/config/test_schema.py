"""The list of settings: every key has a meaning, a type and a reader; help text, tables and JSON follow from it."""

from __future__ import annotations

import ast
import dataclasses
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.settings_table import DOCUMENT, with_current_table
from tinyvae.config.old_files import ALIASES
from tinyvae.config.schema import (
    FIELDS,
    TrainConfig,
    config_help_text,
    path_keys,
    shown_value,
    takes_in_words,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tinyvae"

ISSUE_KEYS = """
    pretrained_model_path variant data_root annotation_file train_split height width n_frames min_frame_delta
    max_frame_delta random_crop random_flip color_jitter color_jitter_params gaussian_blur gaussian_blur_sigma
    train_batch_size gradient_accumulation_steps gradient_checkpointing mixed_precision max_train_steps
    learning_rate lr_scheduler lr_warmup_steps lr_num_cycles beta1 beta2 weight_decay epsilon max_grad_norm
    reconstruction_loss_weight encoder_loss_weight decoder_loss_weight perceptual_loss_weight seraena_loss_weight
    temporal_loss_weight use_seraena n_seraena_frames use_ref_vae cogvideox_model_path ref_vae_type ref_vae_path
    ref_vae_dtype validation_steps num_validation_samples validation_batch_size save_validation_videos
    metric_for_best_model early_stopping_patience checkpointing_steps checkpoints_total_limit resume_from_checkpoint
    output_dir log_every report_to tracker_name dataloader_num_workers prefetch_factor pin_memory allow_tf32
    compile_model compile_mode enable_fused_adam ema_decay optimizer init lr_power logging_dir enable_profiler
    log_system_stats save_model_card seed nccl_timeout
"""


def test_every_key_users_know_is_there() -> None:
    assert not set(ISSUE_KEYS.split()) - {*FIELDS, *ALIASES}


def test_every_key_has_a_meaning_and_a_type_in_words() -> None:
    assert len([key for key, field in FIELDS.items() if field.metadata["group"]]) == 12
    assert next(iter(FIELDS.values())).metadata["group"] == "Model"
    for key, field in FIELDS.items():
        assert field.metadata["meaning"].endswith((".", ")")), key
        assert takes_in_words(key), key


def test_frozen_and_by_keyword() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().height = 64  # type: ignore[misc]
    with pytest.raises(TypeError):
        TrainConfig("taehv")  # type: ignore[misc]


def test_a_configuration_travels_to_another_process() -> None:
    config = TrainConfig(data_root=Path("clips"), seed=5)
    assert pickle.loads(pickle.dumps(config)) == config


def test_values_and_limits_in_words() -> None:
    assert takes_in_words("seed") == "a whole number, at least 0 and below 4294967296"
    assert takes_in_words("seraena_start") == "a whole number or auto, at least 0"
    assert takes_in_words("gaussian_blur_sigma") == "2 numbers, above 0 and at most 10"
    assert takes_in_words("report_to") == "one of tensorboard, wandb, mlflow, none"
    assert takes_in_words("data_root") == "a path or a URL or none"
    assert [shown_value(value) for value in (None, True, 1e-4, (0.1, 2.0))] == ["none", "true", "0.0001", "0.1,2"]
    assert [shown_value(value) for value in ((), ("8x64x64", "8x32x32:2"))] == ["none", "8x64x64,8x32x32:2"]


def test_the_list_of_settings_needs_no_torch_and_no_pydantic() -> None:
    code = "import sys, tinyvae.config.schema as s; s.config_help_text(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "pydantic"} & set(loaded)


def test_text_is_held_as_a_path() -> None:
    assert all(isinstance(getattr(replace(TrainConfig(), **{key: "a/b"}), key), Path) for key in path_keys())
    assert {"logging_dir", "output_dir", "data_root"} <= set(path_keys())


def test_the_help_text_names_every_key_and_its_default() -> None:
    text = config_help_text()
    for key in FIELDS:
        assert f"--{key} (" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_page_that_the_help_names_has_the_places_of_the_lpips_weights() -> None:
    (page,) = re.findall(r"docs/\w+\.md", FIELDS["lpips_weights"].metadata["meaning"])
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "$TINYVAE_LPIPS" in text and "~/.cache/tinyvae" in text


def test_the_documented_table_is_current() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "| `ema_decay` |" in text
    assert text == with_current_table(text), "run: python -m tests.config.settings_table"


# no dead key


def _is_config(node: ast.expr) -> bool:
    """``config``, ``self.config``, ``self._config``, ``loaded.config``, and the same with ``settings``: `ClipSettings`
    takes over the keys of its own names."""
    return (isinstance(node, ast.Name) and node.id in ("config", "settings")) or (
        isinstance(node, ast.Attribute) and node.attr in ("config", "_config", "settings", "_settings")
    )


def _reads(tree: ast.AST) -> set[str]:
    """What is read of a configuration: ``config.KEY``, or ``getattr(config, "KEY")``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            owner, name, *_ = node.args
            if _is_config(owner) and isinstance(name, ast.Constant):
                found.add(name.value)
    return found


def _reads_of_properties() -> dict[str, set[str]]:
    """Method or property of TrainConfig -> the fields it reads."""
    tree = ast.parse((SOURCE / "config" / "schema.py").read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainConfig").body
    return {
        item.name: {
            node.attr
            for node in ast.walk(item)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        for item in body
        if isinstance(item, ast.FunctionDef)
    }


def test_no_key_is_dead() -> None:
    """Every key is read as ``config.KEY`` by something that is not the configuration itself."""
    read: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        inside = file.relative_to(SOURCE)
        if inside.parts[0] == "config":
            continue
        read |= _reads(ast.parse(file.read_text()))
    through = {key for name, keys in _reads_of_properties().items() if name in read for key in keys}
    dead = [key for key in FIELDS if key not in read | through]
    assert not dead, f"{len(dead)} keys are read by nothing: {', '.join(dead)}"

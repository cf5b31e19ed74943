"""What must hold of the settings: types and ranges, rules between keys, files that they name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import fsspec
import pytest
import safetensors.torch
import torch

from tinyvae import TAEHV, save_model
from tinyvae.config.rules import GivenPath, check_config, convert, path_complaints, raise_complaints, value_complaints
from tinyvae.config.schema import TeacherType, TrainConfig
from tinyvae.errors import MissingFileError, UserError
from tinyvae.teachers import TEACHER_KINDS


def check_values(config: TrainConfig) -> None:
    raise_complaints(value_complaints(config))


def check_paths(config: TrainConfig, given: Mapping[str, GivenPath] | None = None) -> None:
    raise_complaints(path_complaints(config, given or {}))


def complaint(config: TrainConfig) -> str:
    with pytest.raises(UserError) as caught:
        check_values(config)
    return str(caught.value)


def test_defaults_pass_their_own_checks() -> None:
    check_values(TrainConfig())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_batch_size": 0}, "train_batch_size=0 must be a whole number, at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be a whole number, at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be a number, above 0 and at most 1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a number, above 0"),
        ({"learning_rate": float("inf")}, "learning_rate=inf must be a number, above 0"),
        ({"train_split": 1.5}, "train_split=1.5 must be a number, above 0 and at most 1"),
        ({"beta2": 1.0}, "beta2=1.0 must be a number, at least 0 and below 1"),
        (
            {"color_jitter_params": (0.1, 0.1, 0.1, -0.1)},
            "0.1, -0.1) must be 4 numbers, at least 0",
        ),
        ({"color_jitter_params": (0.1, 0.1, 0.1, 0.6)}, "the hue is 0.6; it must be at most 0.5"),
        ({"gaussian_blur_sigma": (2.0, 0.1)}, "gaussian_blur_sigma=(2, 0.1) must be (smallest, largest)"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8' must be one of no, fp16, bf16"),
        ({"optimizer": "adam"}, "Did you mean 'adamw'?"),
        ({"max_train_steps": "many"}, "max_train_steps='many' must be a whole number"),
        ({"use_ref_vae": "yes"}, "use_ref_vae='yes' must be true or false"),
        ({"seraena_start": "soon"}, "seraena_start='soon' must be a whole number or auto"),
        ({"min_frame_delta": 3, "max_frame_delta": 2}, "min_frame_delta=3 is above max_frame_delta=2"),
        ({"lr_warmup_steps": 11, "max_train_steps": 10}, "lr_warmup_steps=11 is more than max_train_steps=10"),
        ({"variant": "taehv2"}, "there is no variant 'taehv2'. Did you mean 'taehv'?"),
        ({"model_width": 0.3}, "model_width=0.3 would give channel counts"),
        ({"height": 100}, "multiples of 8, got 100x128; the nearest sizes are 96x128 or 104x128"),
        ({"validation_width": 100}, "validation size: taehv needs a height and width"),
        ({"n_frames": 14}, "n_frames=14 does not suit taehv"),
        ({"variant": "taecvx", "n_frames": 12}, "use a length of 8k or 8k+1, here 9 or 16"),
        ({"variant": "taeh3", "n_frames": 16, "height": 64}, "use a length of 17c, here 17"),
        ({"reconstruction_loss_weight": 0.0}, "all loss weights are 0"),
        ({"perceptual_loss_weight": 0.1, "height": 24}, "needs frames of at least 31x31 pixels, got 24x128"),
        ({"metric_for_best_model": "lpips", "validation_height": 24}, "is LPIPS, which needs frames of at least 31x31"),
        (  # four frames are one latent, which decodes to one frame
            {"temporal_loss_weight": 0.1, "n_frames": 4},
            "temporal_loss_weight needs at least 2 decoded frames, but taehv decodes 1 of n_frames=4; use longer clips",
        ),
        (
            {"use_seraena": True, "seraena_loss_weight": 0.1, "seraena_buffer_mb": 1, "height": 480, "width": 720},
            "does not hold one group of frames (2.14 MB); set seraena_buffer_mb to ten times that",
        ),
        (
            {"use_seraena": True, "seraena_loss_weight": 0.1, "height": 8 * 10**30},
            "the replay buffer of 512 MB does not hold one group of frames",
        ),
        ({"crop_candidates": 65}, "crop_candidates=65 must be a whole number, at least 1 and at most 64"),
        ({"crop_candidates": 4, "random_crop": False}, "crop_candidates=4 needs random_crop, which is off; turn it on"),
        ({"split_by": "annotation"}, "split_by=annotation needs an annotation_file"),
        ({"train_split": 1.0}, "train_split=1 leaves no file to validate on"),
        ({"validation_steps": 0, "early_stopping_patience": 5}, "early_stopping_patience=5 needs validations"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(changes: dict[str, Any], words: str) -> None:
    assert words in complaint(replace(TrainConfig(), **changes))


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("model_width", 16),
        ("train_batch_size", 4096),
        ("gradient_accumulation_steps", 4096),
        ("seraena_buffer_mb", 2**20),
        ("prefetch_factor", 64),
    ],
)
def test_a_number_that_would_fill_the_memory_is_refused(key: str, most: int) -> None:
    """These are taken before or in the first step: a run hung, or the system killed it."""
    check_values(TrainConfig(**{key: most}))
    for value in (most + 1, 10**9, 10**18):
        text = complaint(TrainConfig(**{key: value}))
        assert text.startswith(f"the configuration: {key}={value} must be a") and text.endswith(f"at most {most}.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "resolutions 14x64x64: n_frames=14 does not suit taehv"),
        ({}, "resolutions 8x100x128: taehv needs a height and width that are multiples of 8, got 100x128"),
        ({"temporal_loss_weight": 0.1}, "resolutions 1x24x24: temporal_loss_weight needs at least 2 decoded frames"),
        ({"perceptual_loss_weight": 0.1}, "needs frames of at least 31x31 pixels, got 24x24"),
        (
            {"use_seraena": True, "seraena_loss_weight": 0.1, "n_seraena_frames": 8},
            "resolutions 1x24x24: n_seraena_frames=8 does not divide",
        ),
        (
            {"use_seraena": True, "seraena_loss_weight": 0.1, "seraena_buffer_mb": 1, "n_seraena_frames": 4},
            "resolutions 8x256x256: the replay buffer of 1 MB, a part for each of 5 sizes, does not hold one group",
        ),
    ],
)
def test_every_size_is_checked(changes: dict[str, Any], words: str) -> None:
    sizes = ("8x128x128", "14x64x64", "8x100x128", "1x24x24", "8x256x256")
    assert words in complaint(replace(TrainConfig(), resolutions=sizes, **changes))


def test_all_complaints_come_in_one_message() -> None:
    text = complaint(TrainConfig(train_batch_size=0, n_frames=15, beta1=2.0, encoder_loss_weight=0.1))
    for words in ("4 mistakes", "train_batch_size=0", "n_frames=15", "beta1=2", "encoder_loss_weight=0.1"):
        assert words in text


def test_two_decoded_frames_are_enough_for_the_temporal_loss() -> None:
    check_values(TrainConfig(temporal_loss_weight=0.1, n_frames=5))


def test_a_wrong_key_is_not_complained_of_twice() -> None:
    text = complaint(TrainConfig(height=-8))
    assert text.count("height") == 1, "the size rule would repeat what the range says"


# a term whose needs are not met


@pytest.mark.parametrize("key", ["encoder_loss_weight", "decoder_loss_weight"])
def test_a_teacher_loss_without_a_teacher_is_a_mistake(key: str) -> None:
    assert f"{key}=0.1 needs a teacher, and use_ref_vae is off" in complaint(replace(TrainConfig(), **{key: 0.1}))


def test_a_switch_that_nothing_uses_is_a_mistake() -> None:
    text = complaint(TrainConfig(use_ref_vae=True, ref_vae_path="some/vae", use_seraena=True))
    assert "use_ref_vae is on but encoder_loss_weight=0 and decoder_loss_weight=0" in text
    assert "use_seraena is on but seraena_loss_weight=0" in text


def test_seraena_weight_without_seraena_is_a_mistake() -> None:
    assert "seraena_loss_weight=0.1 needs Seraena" in complaint(TrainConfig(seraena_loss_weight=0.1))


SERAENA = {"use_seraena": True, "seraena_loss_weight": 0.1}


def test_seraena_groups_divide_the_padded_length() -> None:
    config = replace(TrainConfig(), **SERAENA, n_frames=17, n_seraena_frames=5)
    check_values(config)
    assert "use one of 1, 2" in complaint(replace(config, n_seraena_frames=17))


def test_seraena_frames_mean_nothing_while_seraena_is_off() -> None:
    check_values(TrainConfig(n_seraena_frames=0))


def test_seraena_must_be_able_to_begin() -> None:
    late = replace(TrainConfig(), **SERAENA, seraena_start=10_000)
    assert "would never begin" in complaint(late)
    waiting = replace(TrainConfig(), **SERAENA, seraena_start="auto", seraena_patience=5, early_stopping_patience=5)
    assert "the run would end before Seraena begins" in complaint(waiting)
    blind = replace(TrainConfig(), **SERAENA, seraena_start="auto", validation_steps=0)
    assert "seraena_start=auto needs validations" in complaint(blind)


def test_something_is_trained_before_seraena_begins() -> None:
    alone = replace(TrainConfig(), **SERAENA, reconstruction_loss_weight=0.0)
    assert not value_complaints(alone)
    assert "nothing would be trained before Seraena begins" in complaint(replace(alone, seraena_start=5))


TEACHER = {"use_ref_vae": True, "encoder_loss_weight": 0.1}


def test_a_teacher_of_another_family_is_a_mistake() -> None:
    config = replace(TrainConfig(), **TEACHER, variant="taew2_1", ref_vae_path="CogVideoX-2b", ref_vae_type="cogvideox")
    assert "a cogvideox teacher cannot teach taew2_1" in complaint(config)
    assert "set variant to taecvx" in complaint(config)


def test_teacher_families_are_those_of_the_teachers() -> None:
    assert get_args(TeacherType) == TEACHER_KINDS
    config = replace(TrainConfig(), **TEACHER, variant="taeos1_3", ref_vae_path="owner/vae")
    assert "there is no teacher for taeos1_3" in complaint(config)


# files


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder that is not empty; nobody looks into its file here."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.mp4").touch()
    return tmp_path / "data"


def test_no_data_is_a_mistake() -> None:
    with pytest.raises(UserError, match="no data is named"):
        check_paths(TrainConfig())


def test_sample_clips_need_no_folder_yet(tmp_path: Path) -> None:
    check_paths(TrainConfig(data_root=tmp_path / "new", use_sample_clips=True, output_dir=tmp_path / "out"))


def test_data_that_cannot_be_is_said_before_anything_starts(tmp_path: Path, data: Path) -> None:
    empty, other, notes = tmp_path / "mount", tmp_path / "list.txt", tmp_path / "notes"
    empty.mkdir()
    other.write_text("a.mp4")
    (notes / "old").mkdir(parents=True)
    (notes / "old" / "readme.txt").touch()
    broken, blank = tmp_path / "broken.jsonl", tmp_path / "blank.jsonl"
    broken.write_text("a.mp4")
    blank.touch()
    for wrong, says in (
        ({"data_root": empty}, "mount is an empty folder; .*not mounted"),
        ({"data_root": notes}, "notes names no video"),
        ({"data_root": data, "annotation_file": broken}, "broken.jsonl, line 1 is not JSON"),
        ({"data_root": data, "annotation_file": blank}, "blank.jsonl names no video"),
        ({"data_root": data, "annotation_file": other}, r"list.txt is no annotation file .*\.json or \.jsonl"),
        ({"data_root": data, "index_path": other}, "list.txt is no index; name the file that `tinyvae data index`"),
        ({"data_root": data, "index_path": data}, "is a folder; name the file that `tinyvae data index`"),
    ):
        with pytest.raises(UserError, match=says):
            check_paths(replace(TrainConfig(), **wrong))


def test_a_list_that_lies_beside_its_videos_is_proposed(data: Path) -> None:
    (data / "list.jsonl").write_text('{"path": "a.mp4"}')
    with pytest.raises(UserError, match=rf"list.jsonl does not exist .*; {data}/list.jsonl does\."):
        check_paths(TrainConfig(data_root=data, annotation_file=Path("list.jsonl")))
    with pytest.raises(UserError, match=r"other.jsonl does not exist \(looked for [^;]*$"):
        check_paths(TrainConfig(data_root=data, annotation_file=Path("other.jsonl")))


def test_an_output_folder_that_cannot_be_written(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(UserError, match=r"cannot be written: .*a_file is a file"):
        check_paths(TrainConfig(data_root=data, output_dir=tmp_path / "a_file"))
    # Root may write anywhere, so the question to the system is answered here.
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    with pytest.raises(UserError, match=f"output_dir=.*{tmp_path} is not yours to write to"):
        check_paths(TrainConfig(data_root=data, output_dir=tmp_path / "new" / "run"))
    with pytest.raises(UserError, match=f"data_root=.*{tmp_path} is not yours to write to"):
        check_paths(TrainConfig(data_root=tmp_path / "clips", use_sample_clips=True, output_dir=data))
    monkeypatch.setattr(os, "access", lambda place, mode: not mode & os.W_OK or Path(place) != data)
    check_paths(TrainConfig(data_root=data, use_sample_clips=True, output_dir=tmp_path / "out"))  # they are there


@pytest.mark.parametrize(
    "key", ["data_root", "annotation_file", "pretrained_model_path", "lpips_weights", "ref_vae_path"]
)
def test_what_may_not_be_read_is_one_sentence(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    secret = tmp_path / "secret.json"
    secret.mkdir()
    teacher = {**TEACHER, key: str(secret)} if key == "ref_vae_path" else {key: secret}
    config = replace(TrainConfig(), **{"data_root": data, **teacher})
    # Root may read anything, so the question to the system is answered here.
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != secret)
    with pytest.raises(UserError, match=f"^the configuration: {key}={secret} may not be read by you; fix"):
        check_paths(config)


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    file = tmp_path / "clips.json"
    file.write_text("{}")
    with pytest.raises(UserError, match="is a file; name the folder of the videos, or a list as annotation_file"):
        check_paths(TrainConfig(data_root=file))
    with pytest.raises(UserError, match=r"cannot be written: .*clips.json is a file"):
        check_paths(TrainConfig(data_root=tmp_path, output_dir=file / "run"))


def test_lpips_weights_are_asked_for_when_a_term_needs_them(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINYVAE_LPIPS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    check_paths(TrainConfig(data_root=data))
    for needs in ({"perceptual_loss_weight": 0.1}, {"metric_for_best_model": "lpips"}):
        with pytest.raises(UserError, match=r"needs LPIPS weights, and there are none: .*tinyvae lpips-weights"):
            check_paths(replace(TrainConfig(), data_root=data, **needs))
    named = TrainConfig(data_root=data, lpips_weights=tmp_path / "no.safetensors")
    with pytest.raises(UserError, match=r"lpips_weights=.*does not exist"):
        check_paths(named)


def test_an_lpips_file_that_is_none_is_refused_before_the_data_are_indexed(tmp_path: Path, data: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    save_model(TAEHV("taehv", width=0.125), tmp_path / "student.safetensors")
    for wrong, says in (
        ("text", "no readable safetensors file"),
        ("student.safetensors", "does not hold LPIPS weights for AlexNet"),
        ("data", "is a folder; name the file itself"),
    ):
        with pytest.raises(UserError, match=f"lpips_weights: .*{says}"):
            check_paths(TrainConfig(data_root=data, lpips_weights=tmp_path / wrong))


def test_weights_of_another_network_are_refused_at_start(tmp_path: Path, data: Path) -> None:
    save_model(TAEHV("taehv", width=0.125), tmp_path / "small.safetensors")
    right = TrainConfig(data_root=data, pretrained_model_path=tmp_path / "small.safetensors", model_width=0.125)
    check_config(right)
    with pytest.raises(UserError, match=r"model_width=0.125, and model_width is 1"):
        check_paths(replace(right, model_width=1.0))
    with pytest.raises(UserError, match="is not a taew2_2 model"):
        check_paths(replace(right, variant="taew2_2"))
    for key, value in (("latent_space", "vae"), ("activation", "leaky_relu")):
        with pytest.raises(UserError, match=f"is stated to have {key} .*, and {key} is {value}; set {key} to"):
            check_paths(replace(right, **{key: value}))
    (tmp_path / "cut.safetensors").write_bytes(b"12345678{")
    with pytest.raises(UserError, match=r"pretrained_model_path: .*is not a whole safetensors file"):
        check_paths(replace(right, pretrained_model_path=tmp_path / "cut.safetensors"))


def test_a_teacher_folder_must_hold_the_variants_teacher(tmp_path: Path, data: Path) -> None:
    config = replace(TrainConfig(), **TEACHER, data_root=data, variant="taecvx", ref_vae_path=str(tmp_path / "vae"))
    with pytest.raises(UserError, match="name a folder that diffusers can load, or a hub name"):
        check_paths(config)
    (tmp_path / "vae").mkdir()
    with pytest.raises(UserError, match=r"ref_vae_path: .*vae"):
        check_paths(config)
    pytest.importorskip("diffusers")
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKLCogVideoX"}')
    weights = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(3)}, weights)
    check_paths(config)
    whole = weights.read_bytes()
    for cut in (b"", whole[:20], whole[:-1]):
        weights.write_bytes(cut)
        with pytest.raises(UserError, match=r"diffusion_pytorch_model.safetensors is not a whole file .*download it"):
            check_paths(config)
    weights.write_bytes(whole)
    with pytest.raises(UserError, match="does not suit taew2_1"):
        check_paths(replace(config, variant="taew2_1"))


def test_a_hub_name_that_nobody_knows_is_refused_with_the_folder_it_could_have_been(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setattr(pytest.importorskip("huggingface_hub").constants, "ENDPOINT", "http://127.0.0.1:9")
    config = replace(TrainConfig(), **TEACHER, data_root=data, ref_vae_path="owner/name")
    given = {"ref_vae_path": GivenPath(key="ref_vae_path", text="owner/name", base=tmp_path / "project")}
    with pytest.raises(
        MissingFileError, match=f"ref_vae_path: .*owner/name .seen from {tmp_path}/project., and the hub"
    ):
        check_paths(config, given)


# values


def test_numbers_keep_their_meaning() -> None:
    assert convert("max_train_steps", 1e4) == 10_000
    assert isinstance(convert("max_train_steps", 1e4), int)
    assert isinstance(convert("learning_rate", 1), float)
    for key, wrong in (("max_train_steps", 1.5), ("max_train_steps", True), ("max_train_steps", "x"), ("width", None)):
        with pytest.raises(UserError, match=key):
            convert(key, wrong)


def test_spellings_of_other_trainers() -> None:
    assert convert("ref_vae_dtype", "bf16") == "bfloat16"
    assert convert("mixed_precision", "bfloat16") == "bf16"
    assert convert("metric_for_best_model", "reconstruction_loss") == "mse"
    for key, none in (("report_to", "none"), ("mixed_precision", "no"), ("early_stopping_patience", 0)):
        assert convert(key, None) == convert(key, "None") == none
    jitter = {"brightness": 0.1, "contrast": 0.2, "saturation": 0.3, "hue": 0.05}
    assert convert("color_jitter_params", jitter) == (0.1, 0.2, 0.3, 0.05)
    with pytest.raises(UserError, match=r"gamma.*must be 4 numbers"):
        convert("color_jitter_params", {"gamma": 1})


def test_text_of_the_command_line() -> None:
    assert convert("gaussian_blur_sigma", "(0.1, 2.0)") == (0.1, 2.0)
    assert convert("use_ref_vae", "TRUE") is True
    assert convert("checkpoints_total_limit", "none") is None
    assert convert("seraena_start", "auto") == "auto"
    assert convert("seraena_start", "300") == 300
    assert convert("tracker_name", "17") == "17"
    assert convert("data_root", "/a b") == Path("/a b")


def test_places_behind_urls_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVAE_FILE_CACHE_DIR", str(tmp_path))
    system = fsspec.filesystem("memory")
    system.pipe_file("/rules/a.mp4", b"no video")
    system.pipe_file("/rules/list.json", b'[{"path": "../a.mp4"}]')
    check_paths(TrainConfig(data_root="memory://rules"))  # type: ignore[arg-type]
    for changes, says in (
        ({"data_root": "memory://nothing"}, r"data_root=memory://nothing does not exist \(no such bucket"),
        ({"data_root": "memory://rules/a.mp4"}, "data_root=memory://rules/a.mp4 is a file"),
        ({"data_root": "memory://rules", "use_sample_clips": True}, "use_sample_clips needs a local data_root"),
        ({"annotation_file": "memory://rules/list.json"}, "list.json, entry 1: .* leaves the data root memory://rules"),
        ({"index_path": "memory://rules/list.json"}, "index_path=memory://rules/list.json is no index"),
        ({"data_root": "nowhere://x"}, "data_root=nowhere://x cannot be opened: .*Protocol not known"),
    ):
        with pytest.raises(UserError, match=says):
            check_paths(TrainConfig(**changes))  # type: ignore[arg-type]
    system.rm("/rules", recursive=True)

"""Weight files: round trips, what states the variant, and files that are foreign, broken or hostile."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinyvae import TAEHV, VARIANTS, get_spec, load_model, save_model
from tinyvae.errors import FileExistsAlreadyError, MissingFileError, UserError
from tinyvae.models import weights


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)


def bare_state(model: TAEHV) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_states_the_variant(tmp_path: Path, variant: str) -> None:
    model = TAEHV(variant, width=0.125)
    files = save_model(model, tmp_path / "saved", training_step=7)
    assert [f.name for f in files] == ["model.safetensors", "model.pth", "config.json"]
    assert all(f.parent == tmp_path / "saved" and f.is_file() for f in files)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["variant"], config["width"], config["training_step"]) == (variant, 0.125, 7)
    assert config["trim"] == model.spec.trim and config["latent_channels"] == model.spec.latent_channels
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a stated variant is never ambiguous
        for path in ("saved", "saved/model.safetensors", "saved/model.pth"):
            loaded = load_model(tmp_path / path)
            assert loaded.spec == model.spec and same_weights(loaded, model) and not loaded.training


@pytest.mark.parametrize("form", ["a", "a/model.safetensors", "a/model.pth"])
def test_files_state_latent_space_and_activation(tmp_path: Path, form: str) -> None:
    model = TAEHV("taew2_1", width=0.125, latent_space="vae", activation="leaky_relu")
    save_model(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["latent_space"], config["activation"]) == ("vae", "leaky_relu")
    assert config["latent_convention"].startswith("VAE space")
    assert load_model(tmp_path / form).spec == model.spec
    assert load_model(tmp_path / form, latent_space="diffusion", activation="relu").spec.slope == 0
    with pytest.raises(FileExistsAlreadyError, match="describes another model"):
        save_model(TAEHV("taew2_1", width=0.125), tmp_path / "a", formats=(), overwrite=False)


def test_a_file_named_lighttae_gets_one_warning(tmp_path: Path) -> None:
    file = tmp_path / "lighttaew2_1.safetensors"
    save_file(bare_state(TAEHV("taew2_1", width=0.125)), file)
    with pytest.warns(UserWarning) as said:
        load_model(file, "taew2_1")
    (warning,) = said
    assert "named like a network of LightX2V" in str(warning.message) and "latent_space='vae'." in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_model(file, "taew2_1", latent_space="vae").spec.latent_space == "vae"
    with pytest.raises(UserError, match="latent_space='latent' is not known; use 'diffusion' or 'vae'"):
        load_model(file, "taew2_1", latent_space="latent")


def test_few_networks_are_built_to_tell_the_variant(tmp_path: Path) -> None:
    save_model(TAEHV("taew2_1", width=0.125), tmp_path / "a.safetensors")
    weights._network_shapes.cache_clear()
    load_model(tmp_path / "a.safetensors")
    assert weights._network_shapes.cache_info().misses == 1


def test_files_are_as_readable_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    files = save_model(TAEHV("taew2_2", width=0.125), tmp_path / "m")
    assert {file.stat().st_mode for file in files} == {(tmp_path / "other").stat().st_mode}


def test_a_model_in_a_runs_folder_leaves_the_runs_config(tmp_path: Path) -> None:
    """The run's own config.json has `width` in pixels."""
    run = {"format": "tinyvae-run", "variant": "taecvx", "model_width": 0.125, "width": 720, "height": 480}
    (tmp_path / "config.json").write_text(json.dumps(run))
    save_model(TAEHV("taecvx", width=0.125), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == run
    assert load_model(tmp_path).spec.name == "taecvx"


@pytest.mark.parametrize(
    ("variant", "taken", "named"),
    [("taecvx", "taehv", ["taecvx", "taew2_1", "taeos1_3"]), ("taeltx2_3", "taeltx_2", ["taeltx2_3"])],
)
def test_shapes_that_cannot_tell_warn(tmp_path: Path, variant: str, taken: str, named: list[str]) -> None:
    file = tmp_path / "w.safetensors"
    save_file(bare_state(TAEHV(variant, width=0.125)), file)
    with pytest.warns(UserWarning) as seen:
        assert load_model(file).spec.name == taken
    assert len(seen) == 1 and all(name in str(seen[0].message) for name in named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_model(file, variant=variant).spec.name == variant


def test_wrapped_keys_are_stripped(tmp_path: Path) -> None:
    model = TAEHV("taew2_2", width=0.125)
    torch.save({f"module._orig_mod.{k}": v for k, v in bare_state(model).items()}, tmp_path / "w.pth")
    assert same_weights(load_model(tmp_path / "w.pth"), model)
    compiled = torch.nn.Module()
    compiled._orig_mod = model
    save_model_keys = load_file(save_wrapped(compiled, model, tmp_path))
    assert set(save_model_keys) == set(model.state_dict())


def save_wrapped(wrapper: torch.nn.Module, model: TAEHV, folder: Path) -> Path:
    wrapper.spec = model.spec
    return save_model(wrapper, folder / "out.safetensors")[0]  # type: ignore[arg-type]


def test_run_folder_gives_best_then_final_then_newest(tmp_path: Path) -> None:
    models = [TAEHV("taew2_2", width=0.125) for _ in range(4)]
    save_model(models[0], tmp_path / "checkpoint-500", training_step=500)
    save_model(models[1], tmp_path / "checkpoint-1500", training_step=1500)
    assert same_weights(load_model(tmp_path), models[1])
    assert same_weights(load_model(tmp_path / "checkpoint-500"), models[0])
    save_model(models[2], tmp_path / "final_model.safetensors")
    assert same_weights(load_model(tmp_path), models[2])
    save_model(models[3], tmp_path / "best_model")
    assert same_weights(load_model(tmp_path), models[3])


def test_foreign_config_beside_the_file_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file(bare_state(TAEHV("taew2_2", width=0.125)), file)
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLWan", "variant": "fp16"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # these shapes tell
        assert load_model(file).spec == load_model(tmp_path).spec == get_spec("taew2_2", width=0.125)


def test_dtype_is_the_files_unless_asked(tmp_path: Path) -> None:
    save_model(TAEHV("taew2_2", width=0.125), tmp_path / "half", dtype=torch.float16)
    assert load_model(tmp_path / "half").dtype == torch.float16
    assert load_model(tmp_path / "half", dtype=torch.float32).dtype == torch.float32


def test_previews_load_full_weights(tmp_path: Path) -> None:
    model = TAEHV("taew2_2", width=0.125)
    save_model(model, tmp_path / "m")
    preview = load_model(tmp_path / "m", preview="both")
    assert same_weights(preview, model)
    with torch.no_grad():
        assert preview.decode_video(torch.randn(1, 3, 48, 2, 2)).shape == (1, 3, 3, 4, 4)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    save_model(TAEHV("taew2_2", width=0.125), tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    other = TAEHV("taew2_2", width=0.125)
    with pytest.raises(FileExistsAlreadyError, match="overwrite=True"):
        save_model(other, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == before
    save_model(other, tmp_path / "m.safetensors", overwrite=True)
    assert same_weights(load_model(tmp_path / "m.safetensors"), other)
    assert [f.name for f in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_folders_description_is_not_written_over(tmp_path: Path) -> None:
    """Its weights may have been moved away; config.json still says what the folder was made for."""
    save_model(TAEHV("taew2_2", width=0.125), tmp_path)
    for name in ("model.safetensors", "model.pth"):
        (tmp_path / name).unlink()
    with pytest.raises(FileExistsAlreadyError, match="describes another model"):
        save_model(TAEHV("taehv", width=0.125), tmp_path)
    save_model(TAEHV("taehv", width=0.125), tmp_path, overwrite=True)
    assert load_model(tmp_path / "model.pth").spec.name == "taehv"


class RunsCode:
    def __reduce__(self) -> tuple:
        return os.system, ("echo this must not run > owned",)


def hostile_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """name -> (file, what the error must say)"""
    save_model(TAEHV("taew2_2", width=0.125), folder / "good")
    whole, pickled = (folder / "good" / "model.safetensors").read_bytes(), (folder / "good" / "model.pth").read_bytes()
    state = bare_state(TAEHV("taew2_2", width=0.125))
    missing = {k: v for k, v in state.items() if k != "encoder.4.conv.0.bias"}
    wrong_shape = state | {"encoder.4.conv.0.weight": torch.randn(8, 16, 5, 5)}
    contents: dict[str, tuple[bytes | object, str]] = {
        "empty": (b"", "neither"),
        "text": (b"this is no model, only words\n", "neither"),
        "random": (bytes(range(256)) * 40, "neither"),
        "cut header": (whole[:60], "not a whole safetensors"),
        "cut body": (whole[: len(whole) // 2], "not a whole safetensors"),
        "cut pth": (pickled[: len(pickled) // 2], "not a whole .pth"),
        "huge header": ((2**60).to_bytes(8, "little") + b"{" + b"x" * 99, "not a whole safetensors"),
        "runs code": (pickle.dumps({"encoder.0.weight": RunsCode()}, protocol=2), "could run code"),
        "runs code in zip": ({"encoder.0.weight": RunsCode()}, "could run code"),
        "list": ([torch.zeros(2)], "does not hold a state dict"),
        "foreign": ({"conv_in.weight": torch.zeros(3)}, "it begins with conv_in.weight"),
        "missing key": (missing, "encoder.4.conv.0.bias is missing"),
        "wrong shape": (wrong_shape, r"encoder.4.conv.0.weight is \[8, 16, 5, 5\] instead of \[8, 16, 3, 3\]"),
        "extra key": (state | {"loss.weight": torch.zeros(1)}, "loss.weight is not known"),
        "integers": ({k: v.to(torch.int8) for k, v in state.items()}, "not floating point"),
        "eight bits": ({k: v.to(torch.float8_e4m3fn) for k, v in state.items()}, "nothing here computes"),
        "no data": ({k: v.to("meta") for k, v in state.items()}, "no plain tensor"),
        "sparse": ({k: v.to_sparse() for k, v in state.items()}, "no plain tensor"),
        "two models": (state | {f"module.{k}": v for k, v in state.items()}, "both encoder.0.weight and module.enc"),
        "mixed dtypes": (state | {"encoder.0.bias": state["encoder.0.bias"].half()}, "mixes the dtypes"),
    }
    made = {}
    for name, (content, says) in contents.items():
        file = folder / name
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        made[name] = (file, says)
    return made


def test_hostile_files_get_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (file, says) in hostile_files(tmp_path).items():
        with pytest.raises(UserError, match=says) as refused:
            load_model(file)
        assert str(file) in str(refused.value) and "\n" not in str(refused.value), name
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("form", ["model.pth", "old.pth", "model.safetensors"])
def test_changed_bytes_are_refused_or_are_only_other_numbers(tmp_path: Path, form: str) -> None:
    """Fifty damaged copies: whatever torch's reader stumbles over, the user reads a sentence."""
    model = TAEHV("taew2_2", width=0.125)
    save_model(model, tmp_path / "good")
    torch.save(bare_state(model), tmp_path / "good" / "old.pth", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "good" / form).read_bytes()
    draw = random.Random(1)
    file, refused = tmp_path / "changed", 0
    for _ in range(50):
        changed = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(12_000)
            changed[place if draw.random() < 0.5 else len(whole) - 1 - place] = draw.randrange(256)
        file.write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a weight may have become infinite
            try:
                load_model(file, variant="taew2_2")
            except UserError as mistake:
                refused += 1
                assert str(file) in str(mistake) and "\n" not in str(mistake)
    assert refused > 10


def test_values_that_are_not_finite_are_said(tmp_path: Path) -> None:
    state = bare_state(TAEHV("taew2_2", width=0.125))
    state["decoder.22.bias"][0] = torch.nan
    torch.save(state, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match=r"not finite, first in decoder\.22\.bias"):
        load_model(tmp_path / "w.pth")


def test_expanded_tensors_become_weights_that_can_be_trained(tmp_path: Path) -> None:
    state = {k: torch.full((), 0.01).expand(v.shape) for k, v in bare_state(TAEHV("taew2_2", width=0.125)).items()}
    torch.save(state, tmp_path / "w.pth")
    model = load_model(tmp_path / "w.pth")
    model(torch.rand(1, 4, 3, 16, 16))[0].sum().backward()
    before = [parameter.clone() for parameter in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # torch refuses to write into expanded memory
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_mismatch_names_the_likely_variant(tmp_path: Path) -> None:
    save_file(bare_state(TAEHV("taehv1_5", width=0.25)), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"not a taew2_2 model.*looks like taehv1_5.*encoder.17.weight is"):
        load_model(tmp_path / "w.safetensors", variant="taew2_2")
    with pytest.raises(UserError, match="Did you mean 'taehv1_5'"):
        load_model(tmp_path / "w.safetensors", variant="taehv15")


def test_missing_and_ambiguous_paths(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="there is no model at") as missing:
        load_model(tmp_path / "nothing.pth")
    assert isinstance(missing.value, FileNotFoundError) and isinstance(missing.value, ValueError)
    with pytest.raises(UserError, match="holds no weights"):
        load_model(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file(bare_state(TAEHV("taew2_2", width=0.125)), tmp_path / name)
    with pytest.raises(UserError, match=r"2 weight files \(a\.safetensors, b\.safetensors\); name one"):
        load_model(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(UserError, match="neither a file nor a folder"):
            load_model(path)
    with pytest.raises(MissingFileError, match="too long"):
        load_model("x" * 5000)
    with pytest.raises(MissingFileError, match="Did you mean 'taew2_2'"):
        load_model("taew22")
    with pytest.raises(MissingFileError, match=r"name of a variant.*download taehv\.pth .*variant='taehv'"):
        load_model("taehv")


def test_what_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(Root may read everything, so the refusal is played.)"""

    def refuse(*rest: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "w.pth").write_bytes(b"PK")
    (tmp_path / "config.json").write_bytes(b"{}")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"w\.pth cannot be read \(Permission denied\)"):
        load_model(tmp_path / "w.pth")
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"cannot be looked into \(Permission denied\)"):
        load_model(tmp_path)
    for read in ("read_bytes", "read_text"):
        monkeypatch.setattr(Path, read, refuse)
    with pytest.raises(UserError, match=r"config\.json beside the weights cannot be read .*Permission denied"):
        save_model(TAEHV("taew2_2", width=0.125), tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float16"}, "dtype='float16' does not suit weights; use one of torch.float32"),
        ({"device": "gpu"}, r"device='gpu' cannot be used here \(.*gpu\); use 'cpu'"),
        ({"device": "cuda:77"}, "device='cuda:77' cannot be used here"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(tmp_path: Path, options: dict[str, str], says: str) -> None:
    save_model(TAEHV("taew2_2", width=0.125), tmp_path / "w.pth")
    with pytest.raises(UserError, match=says):
        load_model(tmp_path / "w.pth", **options)  # type: ignore[arg-type]


def test_saves_that_were_cut_short_are_not_a_runs_model(tmp_path: Path) -> None:
    first, whole, cut = (TAEHV("taew2_2", width=0.125) for _ in range(3))
    save_model(first, tmp_path / "emergency_checkpoint-0")
    assert same_weights(load_model(tmp_path), first)
    save_model(whole, tmp_path / "checkpoint-5")
    save_model(cut, tmp_path / ".unfinished-checkpoint-10")
    save_model(cut, tmp_path / ".unfinished-removing-checkpoint-7")
    assert same_weights(load_model(tmp_path), whole)


def test_a_save_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    model = TAEHV("taew2_2", width=0.125)
    with pytest.raises(UserError, match=r"end its name in \.safetensors or \.pth"):
        save_model(model, tmp_path / "model.pt")
    (tmp_path / "taken").write_text("a file")
    for target in (tmp_path / "taken", tmp_path / "taken" / "model.pth"):
        with pytest.raises(FileExistsAlreadyError, match="a file is in its way"):
            save_model(model, target)
    with pytest.raises(UserError, match="a FusedTAEHV cannot be saved; save the model that it was made of"):
        save_model(model.fused(), tmp_path / "fused.pth")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"dtype=torch\.int8 does not suit weights; use one of torch\.float32"):
        save_model(model, tmp_path / "short.pth", dtype=torch.int8)
    with pytest.raises(UserError, match=r"formats=\['\.bin'\] cannot be written; name one of \.safetensors"):
        save_model(model, tmp_path / "folder", formats=[".bin"])
    assert [f.name for f in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"{not json", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"format": "\xe9"}', "cannot be read"),
        (b'{"format": "tinyvae-model", "variant": ["taew2_2"]}', "which no model of this family has"),
        (b'{"format": "tinyvae-model", "variant": "taew22"}', "Did you mean 'taew2_2'"),
        (b'{"format": "tinyvae-model", "variant": "taew2_2", "width": "wide"}', "which no model of this family has"),
        (b'{"format": "tinyvae-model", "variant": "taew2_2", "width": 1.0}', "that of another model"),
    ],
)
def test_stated_config_that_is_broken_is_said(tmp_path: Path, config: bytes, says: str) -> None:
    for name in ("model.pth", "taew2_2.pth"):
        torch.save(bare_state(TAEHV("taew2_2", width=0.125)), tmp_path / name)
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(UserError, match=says):
        load_model(tmp_path / "model.pth")
    assert load_model(tmp_path / "taew2_2.pth").spec.name == "taew2_2", "it is not about this one"

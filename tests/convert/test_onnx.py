"""ONNX graphs in onnxruntime against our own streams; the example's loop against whole videos."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.engines.small_models import small
from tinyvae import VARIANTS, StreamingDecoder, StreamingEncoder
from tinyvae.convert.export import ExportMismatchError, check_graphs, export
from tinyvae.convert.onnx import GraphStream, build_graph, stream_decode, stream_encode, unshuffled_weight
from tinyvae.convert.programs import ONNX
from tinyvae.errors import UserError

pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
FAMILIES = ("taehv", "taecvx", "taew2_2", "taew2_2_super", "taeltx_2", "taeh3")
"""One variant of each network and frame rule."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_equal_the_streams(tmp_path: Path, variant: str) -> None:
    model = small(variant)
    spec = model.spec
    export(model, to="onnx", output=tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["decoder.onnx", "encoder.onnx"]
    for height, width in ((2, 3), (5, 4)):  # one file, several sizes
        latents = torch.randn(1, 4, spec.latent_channels, height, width)
        expected = StreamingDecoder(model, num_latents=4).push(latents)
        made = stream_decode(tmp_path / "decoder.onnx", latents, spec)
        torch.testing.assert_close(made, expected, atol=TOLERANCE, rtol=0)
        num_frames = 17 if spec.frame_rule == "chunked" else 3 * spec.time_factor
        frames = torch.rand(1, num_frames, 3, height * spec.space_factor, width * spec.space_factor)
        stream = StreamingEncoder(model)
        expected = torch.cat([stream.push(frames), stream.flush()], dim=1)
        made = stream_encode(tmp_path / "encoder.onnx", frames, spec)
        torch.testing.assert_close(made, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", FAMILIES)
def test_half_precision(tmp_path: Path, variant: str) -> None:
    model = small(variant)
    done = export(model, to="onnx", output=tmp_path, dtype="float16")
    assert done.dtype == "float16" and GraphStream(tmp_path / "decoder.onnx").is_half
    latents = torch.randn(1, 3, model.spec.latent_channels, 3, 3)
    made = stream_decode(tmp_path / "decoder.onnx", latents, model.spec)
    torch.testing.assert_close(made, model.decode_video(latents), atol=2e-2, rtol=0)


def test_two_streams_do_not_disturb_each_other(tmp_path: Path) -> None:
    model = small("taehv")
    export(model, to="onnx", output=tmp_path)
    videos = torch.randn(2, 3, 16, 2, 3)
    streams = [GraphStream(tmp_path / "decoder.onnx") for _ in range(2)]
    turns = [[stream.step(videos[n, t][None]) for n, stream in enumerate(streams)] for t in range(3)]
    for number in range(2):
        raw = torch.cat([turn[number] for turn in turns])
        torch.testing.assert_close(raw[3:], model.decode_video(videos[number][None])[0], atol=TOLERANCE, rtol=0)


def test_names_and_sizes_are_those_of_the_metadata(tmp_path: Path) -> None:
    import onnx

    model = small("taeltx_2")
    export(model, to="onnx", output=tmp_path)
    for side, states in (("encoder", 9), ("decoder", 9)):
        proto = onnx.load(tmp_path / f"{side}.onnx")
        (stated,) = [json.loads(prop.value) for prop in proto.metadata_props]
        assert stated["side"] == side and len(stated["states"]) == states
        names = [value.name for value in proto.graph.input]
        assert names == ["frames" if side == "encoder" else "latent", *(f"state_{i}" for i in range(states))]
        shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input]
        for (channels, multiple), shape in zip(stated["states"], shapes[1:], strict=True):
            times = f"{multiple}*" if multiple > 1 else ""
            assert shape == [1, channels, f"{times}latent_height", f"{times}latent_width"]
        assert all(len(shape) == 4 for shape in shapes)
        onnx.checker.check_model(proto, full_check=True)


def test_the_channel_order_of_space_to_depth() -> None:
    weight = torch.arange(12.0).view(1, 12, 1, 1)
    # pixel_unshuffle: color, then pixel; SpaceToDepth: pixel, then color
    assert unshuffled_weight(weight, 2).flatten().tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]


def test_a_wrong_graph_is_noticed(tmp_path: Path) -> None:
    model, other = small("taehv"), small("taehv")
    files = [tmp_path / "encoder.onnx", tmp_path / "decoder.onnx"]
    for side, file, source in (("encoder", files[0], model), ("decoder", files[1], other)):
        file.write_bytes(build_graph(source, side, torch.float32).SerializeToString())  # type: ignore[arg-type]
    with pytest.raises(ExportMismatchError, match=r"by the rules of ONNX .*the frames differ"):
        check_graphs(*files, model, ONNX)


def test_without_the_package_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"needs the package 'onnx'.*pip install 'tinyvae\[onnx\]'"):
        export(small("taehv"), to="onnx", output=tmp_path)
    assert list(tmp_path.iterdir()) == []


# the example


def load_example() -> ModuleType:
    file = Path(__file__).resolve().parents[2] / "examples" / "stream_onnx.py"
    found = importlib.util.spec_from_file_location("stream_onnx", file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("variant", FAMILIES)
def test_the_example_streams_whole_videos(tmp_path: Path, variant: str) -> None:
    """Frame by frame, for lengths that fit no whole latent too: the same numbers as the whole-video calls."""
    example, model = load_example(), small(variant)
    export(model, to="onnx", output=tmp_path)
    for num_frames in (1, 18, 34):
        frames = torch.rand(1, num_frames, 3, 2 * model.spec.space_factor, model.spec.space_factor)
        encoder = example.OnnxEncoder(tmp_path / "encoder.onnx")
        latents = [latent for frame in frames[0].numpy() for latent in encoder.push(frame)]
        latents += encoder.flush(frames[0, -1].numpy())
        expected = model.encode_video(frames)
        torch.testing.assert_close(torch.from_numpy(np.stack(latents)), expected[0], atol=TOLERANCE, rtol=0)
        decoder = example.OnnxDecoder(tmp_path / "decoder.onnx", num_latents=len(latents))
        made = [frame for latent in latents for frame in decoder.push(latent)]
        torch.testing.assert_close(
            torch.from_numpy(np.stack(made)), model.decode_video(expected)[0], atol=TOLERANCE, rtol=0
        )

"""A model as two ONNX graphs that stream: one latent a call, carried state as inputs and outputs.

``encoder.onnx`` takes the S frames of one latent (S is the variant's time factor), ``decoder.onnx`` takes one latent
and gives S frames. Both are 4-D: time lies in the batch dimension. Height and width are dynamic. Each graph has inputs
``state_0``, ``state_1``, ... and outputs ``next_state_0``, ...; zeros start a video. The metadata key ``tinyvae`` is
JSON with everything that the caller's loop needs: time factor, frame rule, and the size of each state.

The graphs are written node by node from the folded layers (`engines.fold`), so the export needs neither a tracer nor
example inputs, and the graphs do less arithmetic than the plain network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from tinyvae import __version__
from tinyvae.engines.fold import (
    ClampLayer,
    ConvLayer,
    GrowLayer,
    Layer,
    MemLayer,
    PoolLayer,
    Size,
    SuperMemLayer,
    WideMemLayer,
    fold_layers,
)
from tinyvae.errors import require_package
from tinyvae.models.variants import H3_CHUNK_FRAMES, H3_CHUNK_LATENTS, H3_CHUNK_ZEROS, H3_DROPPED_LATENTS, VariantSpec

if TYPE_CHECKING:
    from tinyvae.models.taehv import TAEHV

Side = Literal["encoder", "decoder"]
OPSET, IR_VERSION = 18, 10  # both are read by onnxruntime from 1.18 on, and by TensorRT
METADATA_KEY = "tinyvae"
PROBE = 8  # height and width of the latent whose sizes are followed; the graph itself works at every size
FILES: dict[Side, str] = {"encoder": "encoder.onnx", "decoder": "decoder.onnx"}


class GraphWriter:
    """The nodes and weights of one graph, in the order in which they run."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._onnx = require_package("onnx", extra="onnx", needed_for="an ONNX export")
        self._dtype = dtype
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.states: list[tuple[int, int]] = []  # (channels, size as a multiple of the latent's)
        self.next_states: list[str] = []

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node; returns the name of its output."""
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(self._onnx.helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Tensor | list[int]) -> str:
        """Store a weight in the graph's dtype, or a list of whole numbers as int64; returns its name."""
        name = f"constant_{len(self.weights)}"
        array = value.detach().cpu().to(self._dtype).numpy() if isinstance(value, Tensor) else np.array(value, np.int64)
        self.weights.append(self._onnx.numpy_helper.from_array(array, name))
        return name

    def conv(self, x: str, weight: Tensor, bias: Tensor | None = None, **attributes: Any) -> str:
        """A convolution that keeps the grid unless ``strides`` or ``pads`` say otherwise."""
        around = weight.shape[-1] // 2
        attributes = {"pads": [around] * 4, **attributes}
        inputs = [x, self.constant(weight)] + ([] if bias is None else [self.constant(bias)])
        return self.add("Conv", *inputs, kernel_shape=list(weight.shape[2:]), **attributes)

    def activate(self, x: str, slope: float) -> str:
        """ReLU, or LeakyReLU where ``slope`` is not 0."""
        return self.add("LeakyRelu", x, alpha=slope) if slope else self.add("Relu", x)

    def regroup(self, x: str, channels: int) -> str:
        """Move frames between batch and channels: the same values with this many channels."""
        return self.add("Reshape", x, self.constant([-1, channels, 0, 0]))  # 0: as in the input

    def frame_before(self, x: str, size: Size) -> str:
        """For each frame of ``x`` the one before it; the first comes from the carried state, the last goes into it."""
        number = len(self.states)
        self.states.append((size.channels, size.height // PROBE))
        state = f"state_{number}"
        if size.frames == 1:
            self.next_states.append(x)
            return state
        axis = self.constant([0])
        earlier = self.add("Slice", x, self.constant([0]), self.constant([-1]), axis)
        self.next_states.append(self.add("Slice", x, self.constant([-1]), self.constant([size.frames]), axis))
        return self.add("Concat", state, earlier, axis=0)


def write_layer(graph: GraphWriter, layer: Layer, x: str, size: Size) -> str:
    """Append one folded layer to the graph; returns the name of its output. ``size``: of what goes in."""
    if isinstance(layer, ClampLayer):
        third, three = (graph.constant(torch.tensor(value)) for value in (1 / 3, 3.0))
        return graph.add("Mul", graph.add("Tanh", graph.add("Mul", x, third)), three)
    if isinstance(layer, ConvLayer):
        x = graph.conv(x, layer.weight, layer.bias)
        x = graph.activate(x, layer.slope) if layer.relu else x
        x = graph.add("DepthToSpace", x, blocksize=2, mode="CRD") if layer.shuffle else x
        return graph.regroup(x, layer.output(size).channels) if layer.frames > 1 else x
    if isinstance(layer, MemLayer | WideMemLayer):
        return _write_mem(graph, layer, x, size)
    if isinstance(layer, SuperMemLayer):
        now = graph.conv(x, layer.depth, group=size.channels)
        then = graph.conv(x, layer.past_depth, group=size.channels)
        both = graph.add("Concat", now, graph.frame_before(then, size), axis=1)
        wide = graph.activate(graph.conv(both, layer.widen, layer.widen_bias), layer.slope)
        return graph.add("Add", x, graph.conv(wide, layer.narrow))
    if isinstance(layer, PoolLayer):
        stacked = graph.regroup(x, layer.stride * size.channels) if layer.stride > 1 else x
        return graph.conv(stacked, layer.weight, strides=[2, 2])
    assert isinstance(layer, GrowLayer), layer
    phases = layer.weight.chunk(4)  # rows 0 0 1 1, columns 0 1 0 1 of each doubled pixel
    padding = ([1, 1, 0, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1])  # top, left, bottom, right
    made = [graph.conv(x, weight, pads=pads) for weight, pads in zip(phases, padding, strict=True)]
    x = graph.add("DepthToSpace", graph.add("Concat", *made, axis=1), blocksize=2, mode="DCR")
    x = graph.regroup(x, layer.output(size).channels) if layer.frames > 1 else x
    return graph.activate(x, layer.slope) if layer.relu else x


def _write_mem(graph: GraphWriter, layer: MemLayer | WideMemLayer, x: str, size: Size) -> str:
    slope = layer.slope
    now = graph.conv(x, layer.first[: size.channels], layer.first_bias[: size.channels])
    then = graph.conv(x, layer.first[size.channels :])
    y = graph.activate(graph.add("Add", now, graph.frame_before(then, size)), slope)
    if isinstance(layer, WideMemLayer):
        y = graph.activate(graph.conv(y, layer.second, layer.second_bias, group=layer.groups), slope)
        y = graph.activate(graph.conv(y, layer.third, layer.third_bias), slope)
        y = graph.conv(y, layer.fourth, layer.fourth_bias, group=layer.groups)
    else:
        y = graph.activate(graph.conv(y, layer.second, layer.second_bias), slope)
        y = graph.conv(y, layer.third, layer.third_bias)
    return graph.activate(graph.add("Add", y, x), slope)


def unshuffled_weight(weight: Tensor, patch: int) -> Tensor:
    """The first convolution for SpaceToDepth's channel order (pixel, color) instead of pixel_unshuffle's."""
    return weight.unflatten(1, (3, patch**2)).transpose(1, 2).flatten(1, 2)


def build_graph(model: TAEHV, side: Side, dtype: torch.dtype) -> Any:
    """One half of a model as an ONNX ``ModelProto`` that streams (see the module)."""
    spec, patch, graph = model.spec, model.spec.patch_size, GraphWriter(dtype)
    with torch.no_grad():
        if side == "encoder":
            x = graph.add("SpaceToDepth", "frames", blocksize=patch) if patch > 1 else "frames"
            size = Size(spec.time_factor, spec.image_channels, 8 * PROBE, 8 * PROBE)
        else:
            x, size = "latent", Size(1, spec.latent_channels, PROBE, PROBE)
        for number, layer in enumerate(fold_layers(getattr(model, side))):
            if side == "encoder" and number == 0:
                assert isinstance(layer, ConvLayer)
                x = graph.activate(graph.conv(x, unshuffled_weight(layer.weight, patch), layer.bias), layer.slope)
            else:
                x = write_layer(graph, layer, x, size)
            size = layer.output(size)
        if side == "decoder":
            x = graph.add("DepthToSpace", x, blocksize=patch, mode="CRD") if patch > 1 else x
            x = graph.add("Clip", x, graph.constant(torch.tensor(0.0)), graph.constant(torch.tensor(1.0)))
    return _model_of(graph, x, spec, side, dtype)


def _model_of(graph: GraphWriter, last: str, spec: VariantSpec, side: Side, dtype: torch.dtype) -> Any:
    import onnx
    from onnx import TensorProto, helper

    kind = TensorProto.FLOAT16 if dtype == torch.float16 else TensorProto.FLOAT
    results = [("frames" if side == "decoder" else "latent", last)]
    results += [(f"next_state_{number}", name) for number, name in enumerate(graph.next_states)]
    nodes = [*graph.nodes, *(helper.make_node("Identity", [made], [name]) for name, made in results)]

    def value(name: str, frames: int, channels: int, *, multiple: int) -> Any:
        sides = [f"{multiple}*latent_{word}" if multiple > 1 else f"latent_{word}" for word in ("height", "width")]
        return helper.make_tensor_value_info(name, kind, [frames, channels, *sides])

    latent = value("latent", 1, spec.latent_channels, multiple=1)
    frames = value("frames", spec.time_factor, 3, multiple=spec.space_factor)
    before, after = (
        [value(f"{word}_{i}", 1, channels, multiple=m) for i, (channels, m) in enumerate(graph.states)]
        for word in ("state", "next_state")
    )
    given, made = (latent, frames) if side == "decoder" else (frames, latent)
    proto = helper.make_model(
        helper.make_graph(nodes, f"{spec.name}_{side}", [given, *before], [made, *after], graph.weights),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="tinyvae",
        producer_version=__version__,
    )
    helper.set_model_props(proto, {METADATA_KEY: json.dumps(describe_stream(spec, side, graph.states))})
    onnx.checker.check_model(proto)
    return proto


def describe_stream(spec: VariantSpec, side: Side, states: list[tuple[int, int]]) -> dict[str, Any]:
    """What a caller's loop needs to know.

    ``states``: for each state its channels, and its height and width as a multiple of the latent's. ``chunk``: for
    taeh3, how the encoder cuts a video and which decoded frames are dropped; null for the others.
    """
    chunk = {
        "frames": H3_CHUNK_FRAMES,
        "zeros_before": H3_CHUNK_ZEROS,
        "latents": H3_CHUNK_LATENTS,
        "last_latents_dropped": H3_DROPPED_LATENTS,
    }
    return {
        "variant": spec.name,
        "side": side,
        "latent_space": spec.latent_space,
        "latent_channels": spec.latent_channels,
        "time_factor": spec.time_factor,
        "space_factor": spec.space_factor,
        "frame_rule": spec.frame_rule,
        "trim": spec.trim,
        "chunk": chunk if spec.frame_rule == "chunked" else None,
        "states": [list(state) for state in states],
    }


# running, for the check


class GraphStream:
    """One graph in onnxruntime with the state of one video. ``num_threads``: 0 leaves the choice to onnxruntime.

    Example: ``GraphStream(Path("decoder.onnx")).step(latent)`` gives S frames (S, 3, H, W) of a latent (1, C, h, w).
    """

    def __init__(self, file: Path, *, num_threads: int = 0) -> None:
        runtime = require_package("onnxruntime", extra="onnx", needed_for="the check of an ONNX export")
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # its warnings are about speed
        options.intra_op_num_threads = num_threads
        self._session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.facts = json.loads(self._session.get_modelmeta().custom_metadata_map[METADATA_KEY])
        self.is_half = self._session.get_inputs()[0].type == "tensor(float16)"
        self._states: list[np.ndarray] | None = None

    def feeds(self, given: Tensor) -> dict[str, np.ndarray]:
        """The inputs of the next call, by name."""
        array = given.detach().cpu().numpy().astype(np.float16 if self.is_half else np.float32)
        if self._states is None:
            factor = self.facts["space_factor"] if self.facts["side"] == "encoder" else 1
            height, width = array.shape[2] // factor, array.shape[3] // factor
            sizes = [(1, channels, n * height, n * width) for channels, n in self.facts["states"]]
            self._states = [np.zeros(size, array.dtype) for size in sizes]
        named = {f"state_{number}": state for number, state in enumerate(self._states)}
        return {self._session.get_inputs()[0].name: array, **named}

    def step(self, given: Tensor) -> Tensor:
        """The next call of the stream: float32 in and out, whatever the graph's dtype is."""
        made, *self._states = self._session.run(None, self.feeds(given))
        return torch.from_numpy(made.astype(np.float32))


def stream_decode(file: Path, latents_1TCHW: Tensor, spec: VariantSpec) -> Tensor:
    """Frames 1TCHW that ``decoder.onnx`` makes of a video's latents, one latent a call."""
    stream, num_latents = GraphStream(file), latents_1TCHW.shape[1]
    raw = torch.cat([stream.step(latent) for latent in latents_1TCHW.unbind(1)])
    return raw[[place for place in range(len(raw)) if spec.frame_is_kept(place, num_latents)]][None]


def stream_encode(file: Path, frames_1TCHW: Tensor, spec: VariantSpec) -> Tensor:
    """Latents 1TCHW that ``encoder.onnx`` makes of a video, S frames a call; T is a whole number of latents (taeh3:
    one chunk of 17 frames)."""
    if spec.frame_rule == "chunked":
        zeros = torch.zeros_like(frames_1TCHW[:, :H3_CHUNK_ZEROS])
        frames_1TCHW = torch.cat([zeros, frames_1TCHW], dim=1)
    stream = GraphStream(file)
    made = [stream.step(group) for group in frames_1TCHW[0].split(spec.time_factor)]
    return torch.stack(made[:-H3_DROPPED_LATENTS] if spec.frame_rule == "chunked" else made, dim=1)

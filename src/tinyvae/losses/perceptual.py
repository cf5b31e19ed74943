"""LPIPS v0.1 with AlexNet, in plain torch: the perceptual loss and the metric of validation.

The weights are one safetensors file of five convolutions ``features.i`` and five linear heads ``lin.i``; where it
comes from is `lpips_weights`. Videos here are in [0, 1] and LPIPS was fitted on [-1, 1]: `LPIPS` maps them itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tinyvae.errors import MissingFileError, UserError

WIDTHS = (64, 192, 384, 256, 256)
KERNELS = (11, 5, 3, 3, 3)
STRIDES = (4, 1, 1, 1, 1)
PADDINGS = (2, 2, 1, 1, 1)
POOLED_BEFORE = (1, 2)  # a 3x3 max-pool of stride 2 stands before these convolutions

MIN_PIXELS = 31
"""Below this height or width the second max-pool has nothing left to pool."""

SQUARED_NORM_FLOOR = 1e-10
"""Added under the square root of a feature's squared norm. At a norm of 0 the root has no gradient (NaN); the norms
of real features are 1 to 100, so distances move by less than 1e-6."""


class LPIPS(nn.Module):
    """Perceptual distance of image pairs; frozen, in eval mode, always computed in fp32."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        inputs = (3, *WIDTHS[:-1])
        self.features = nn.ModuleList(
            nn.Conv2d(c_in, c_out, kernel, stride, padding)
            for c_in, c_out, kernel, stride, padding in zip(inputs, WIDTHS, KERNELS, STRIDES, PADDINGS, strict=True)
        )
        self.lin = nn.ModuleList(nn.Conv2d(channels, 1, 1, bias=False) for channels in WIDTHS)
        # AlexNet's mean and deviation of ImageNet colours, expressed for images in [-1, 1].
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False)
        self.eval()

    @classmethod
    def from_file(cls, path: str | Path) -> LPIPS:
        """LPIPS with the weights of a safetensors file (``tinyvae lpips-weights`` makes it)."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(path)
        if not path.is_file():
            raise MissingFileError(f"there are no LPIPS weights at {path}; get them with: tinyvae lpips-weights")
        try:
            weights = load_file(path)
        except SafetensorError as broken:
            raise UserError(
                f"the LPIPS weights {path} are no readable safetensors file ({broken}); "
                "get them again with: tinyvae lpips-weights"
            ) from None
        with torch.random.fork_rng(devices=[]):  # fresh layers draw random weights; the run's own stream stays put
            model = cls()
        wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        found = {name: tuple(value.shape) for name, value in weights.items()}
        if wanted != found:
            wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            raise UserError(
                f"{path} does not hold LPIPS weights for AlexNet (first wrong entry: {wrong[0]}); "
                "get them with: tinyvae lpips-weights"
            )
        model.load_state_dict(weights)
        return model

    def train(self, mode: bool = True) -> LPIPS:
        """LPIPS is a ruler: it stays in eval mode when the model around it trains."""
        return super().train(False)

    def forward(self, a_NCHW: Tensor, b_NCHW: Tensor) -> Tensor:
        """Distance of each image pair in [0, 1] (values outside are allowed, as training makes them); (N,) in fp32."""
        assert a_NCHW.shape == b_NCHW.shape, f"two shapes: {tuple(a_NCHW.shape)} and {tuple(b_NCHW.shape)}"
        height, width = a_NCHW.shape[-2:]
        if min(height, width) < MIN_PIXELS:
            raise UserError(f"LPIPS needs images of at least {MIN_PIXELS}x{MIN_PIXELS} pixels, got {height}x{width}.")
        with torch.autocast(device_type=a_NCHW.device.type, enabled=False):
            pairs = zip(self._taps(a_NCHW.float()), self._taps(b_NCHW.float()), self.lin, strict=True)
            return torch.stack([head((a - b).square()).mean(dim=(1, 2, 3)) for a, b, head in pairs]).sum(dim=0)

    def _taps(self, images_NCHW: Tensor) -> list[Tensor]:
        """The five feature maps after their ReLU, each pixel's channels scaled to unit length."""
        x = (2 * images_NCHW - 1 - self.shift) / self.scale
        taps = []
        for index, conv in enumerate(self.features):
            if index in POOLED_BEFORE:
                x = max_pool(x)
            x = F.relu(conv(x))
            taps.append(x * (x.square().sum(dim=1, keepdim=True) + SQUARED_NORM_FLOOR).rsqrt())
        return taps


def max_pool(x_NCHW: Tensor) -> Tensor:
    """Max-pool of 3x3 pixels, stride 2.

    torch's own gradient on a GPU adds up overlapping windows in any order, so that its bits change from run to run.
    Where a run asks for the same bits (`deterministic`), the windows are compared slice by slice instead.
    """
    if not (torch.are_deterministic_algorithms_enabled() and x_NCHW.requires_grad):
        return F.max_pool2d(x_NCHW, kernel_size=3, stride=2)
    for dim in (2, 3):
        end = (x_NCHW.shape[dim] - 3) // 2 * 2 + 1
        rows = [x_NCHW.narrow(dim, offset, end) for offset in range(3)]
        even = [part[:, :, ::2] if dim == 2 else part[..., ::2] for part in rows]
        x_NCHW = torch.maximum(torch.maximum(even[0], even[1]), even[2])
    return x_NCHW


def perceptual_loss(
    lpips: LPIPS,
    decoded_NTCHW: Tensor,
    target_NTCHW: Tensor,
    max_frames: int | None = None,
    *,
    offset: int = 0,
) -> Tensor:
    """Mean LPIPS distance of decoded frames from target frames in [0, 1]; a scalar in fp32.

    ``max_frames`` bounds the work: that many evenly spaced frames of every clip. ``offset`` moves the choice (give
    the step number), so that over the steps every frame has its turn without any random draw.
    """
    assert decoded_NTCHW.shape == target_NTCHW.shape, f"{tuple(decoded_NTCHW.shape)}, {tuple(target_NTCHW.shape)}"
    num_frames = decoded_NTCHW.shape[1]
    if max_frames is not None and max_frames < num_frames:
        chosen = sorted((offset + index * num_frames // max_frames) % num_frames for index in range(max_frames))
        decoded_NTCHW, target_NTCHW = decoded_NTCHW[:, chosen], target_NTCHW[:, chosen]
    return lpips(decoded_NTCHW.flatten(0, 1), target_NTCHW.flatten(0, 1)).mean()

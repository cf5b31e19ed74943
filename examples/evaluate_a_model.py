# %% [markdown]
# # Evaluate a model in Python
# Run it cell by cell in an editor that knows `# %%`, or as a script: `python examples/evaluate_a_model.py`.
# It needs nothing but tinyvae: the videos are procedural sample clips, the model has fresh weights.
# Put the path of your own weights or run folder into `model`, and your own folder of videos into `data`.

# %%
import tempfile
from pathlib import Path

import torch

from tinyvae import TAEHV
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.evaluation import clip_metrics, evaluate
from tinyvae.evaluation.compare import compare

folder = Path(tempfile.mkdtemp(prefix="tinyvae-example-"))
write_sample_clips(folder / "clips", count=5, height=64, width=96, frames=17)
data = folder / "clips"

torch.manual_seed(0)
model = TAEHV("taehv", width=0.125)  # or a path: "output/my_run", "taew2_2.safetensors", "CogVideoX-2b/vae"

# %% [markdown]
# ## Numbers
# `evaluate` streams every video through the model and returns a plain dataclass.

# %%
result = evaluate(model, data, lpips=None, label="fresh weights")
for name, estimate in (("PSNR", result.summary.psnr), ("flicker error", result.summary.flicker_error)):
    assert estimate is not None
    print(f"{name}: {estimate.mean:.4f}, 95 % interval {estimate.low:.4f} to {estimate.high:.4f}")
print(f"{result.cost.decode_fps:.0f} frames/s decoded, {result.model.parameters:,} parameters")

worst = min(result.clips, key=lambda clip: clip.metrics.psnr)
print(f"worst clip: {worst.name}, its frames: {[round(value, 1) for value in worst.metrics.psnr_by_frame]}")

# %% [markdown]
# ## Two models on the same clips
# Differences are paired clip by clip, so that hard and easy clips cancel out.

# %%
torch.manual_seed(1)
comparison = compare([model, TAEHV("taehv", width=0.25)], data, lpips=None)
for difference in comparison.candidates[0].differences:
    print(f"{difference.metric}: {difference.difference.mean:+.5f} ({difference.verdict})")

# %% [markdown]
# ## Tensors that you have already
# Frames are N T C H W in [0, 1]; the codec says which input frames its output stands for.

# %%
frames = torch.rand(1, 17, 3, 64, 96)
decoded = model.decode_video(model.encode_video(frames))
(clip,) = clip_metrics(decoded, model.target(frames))
print(f"noise: PSNR {clip.psnr:.2f} dB, SSIM {clip.ssim:.3f}")

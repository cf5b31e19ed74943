"""Pipelines of diffusers with random networks of a few thousand weights, built without any download.

Each function takes a VAE and gives a whole pipeline and the arguments of a short call: two steps, frames of 32x32 or
64x64. Wan, CogVideoX, HunyuanVideo and LTX get a random text encoder and a tokenizer of a few words; the others take
random prompt embeddings, because their text encoders are vision-language models.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers import ModelMixin
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

HIDDEN = 16
WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "ball", "rolls"]
PROMPT = "a red ball rolls"
Call = dict[str, Any]


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
    )


def t5_encoder(kind: str = "T5") -> Any:
    sizes = {"d_model": HIDDEN, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": len(WORDS)}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}EncoderModel")(config).eval()


def picture(height: int, width: int) -> Image.Image:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(6))


def euler(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def _wan_parts(vae: ModelMixin, channels_in: int) -> dict[str, Any]:
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels_in,
        out_channels=vae.config.z_dim,
        text_dim=HIDDEN,
        freq_dim=16,
        ffn_dim=16,
        num_layers=1,
        rope_max_seq_len=32,
    )
    parts = {"vae": vae, "transformer": transformer, "scheduler": euler(shift=3.0)}
    return parts | {"tokenizer": tokenizer(), "text_encoder": t5_encoder("UMT5")}


def _wan_prompts(pipe: Any) -> Call:
    """Embedded here: the pipeline would clean the prompt with a package (ftfy) that nothing else needs."""
    words = pipe.tokenizer([PROMPT, "a"], padding="max_length", max_length=16, return_tensors="pt")
    with torch.no_grad():
        wanted, unwanted = pipe.text_encoder(words.input_ids, words.attention_mask).last_hidden_state.split(1)
    return {"prompt_embeds": wanted, "negative_prompt_embeds": unwanted}


def wan(vae: ModelMixin) -> tuple[Any, Call]:
    pipe = diffusers.WanPipeline(**_wan_parts(vae, vae.config.z_dim))
    size = 4 * vae.config.scale_factor_spatial
    return pipe, _wan_prompts(pipe) | {"height": size, "width": size, "num_frames": 9}


def wan_image(vae: ModelMixin) -> tuple[Any, Call]:
    """Wan 2.2 image-to-video: the latents of the picture and a mask of 4 channels beside the noise."""
    pipe = diffusers.WanImageToVideoPipeline(**_wan_parts(vae, 2 * vae.config.z_dim + 4), boundary_ratio=0.9)
    pipe.register_modules(transformer_2=pipe.transformer)
    return pipe, _wan_prompts(pipe) | {"image": picture(32, 32), "height": 32, "width": 32, "num_frames": 9}


def hunyuan(vae: ModelMixin) -> tuple[Any, Call]:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=HIDDEN,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    sizes = {"vocab_size": len(WORDS), "intermediate_size": 16, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(hidden_size=HIDDEN, num_hidden_layers=3, num_key_value_heads=2, **sizes)
    clip = transformers.CLIPTextConfig(hidden_size=8, projection_dim=8, num_hidden_layers=1, eos_token_id=1, **sizes)
    pipe = diffusers.HunyuanVideoPipeline(
        vae=vae,
        transformer=transformer,
        scheduler=euler(shift=7.0),
        text_encoder=transformers.LlamaModel(llama).eval(),
        tokenizer=tokenizer(),
        text_encoder_2=transformers.CLIPTextModel(clip).eval(),
        tokenizer_2=tokenizer(),
    )
    call = {"prompt": PROMPT, "height": 32, "width": 32, "num_frames": 9, "max_sequence_length": 16}
    return pipe, call | {"prompt_template": {"template": "a {}", "crop_start": 1}}


def hunyuan_1_5(vae: ModelMixin) -> tuple[Any, Call]:
    pipe = diffusers.HunyuanVideo15Pipeline(**_hunyuan_1_5_parts(vae))
    return pipe, {"height": 64, "width": 64, "num_frames": 9, **_hunyuan_1_5_prompt()}


def hunyuan_1_5_image(vae: ModelMixin) -> tuple[Any, Call]:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(image_size=54, patch_size=2, **sizes)
    pipe = diffusers.HunyuanVideo15ImageToVideoPipeline(
        **_hunyuan_1_5_parts(vae, task_type="i2v"),
        image_encoder=transformers.SiglipVisionModel(vision).eval(),
        feature_extractor=transformers.SiglipImageProcessor(size={"height": 54, "width": 54}),
    )
    return pipe, {"image": picture(64, 64), "num_frames": 9, **_hunyuan_1_5_prompt()}


def _hunyuan_1_5_parts(vae: ModelMixin, task_type: str = "t2v") -> dict[str, Any]:
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_refiner_layers=1,
        text_embed_dim=HIDDEN,
        text_embed_2_dim=HIDDEN,
        image_embed_dim=8,
        rope_axes_dim=(2, 4, 4),
        target_size=64,
        task_type=task_type,
    )
    parts = {"vae": vae, "transformer": transformer, "scheduler": euler(shift=7.0)}
    absent = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return parts | absent | {"guider": diffusers.ClassifierFreeGuidance(guidance_scale=1.0)}


def _hunyuan_1_5_prompt() -> Call:
    return {
        "prompt_embeds": noise(1, 4, HIDDEN),
        "prompt_embeds_mask": torch.ones(1, 4),
        "prompt_embeds_2": noise(1, 4, HIDDEN),
        "prompt_embeds_mask_2": torch.ones(1, 4),
    }


def _cogvideox_parts(vae: ModelMixin, channels_in: int) -> dict[str, Any]:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=channels_in,
        out_channels=16,
        time_embed_dim=4,
        text_embed_dim=HIDDEN,
        num_layers=1,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        max_text_seq_length=16,
        use_rotary_positional_embeddings=True,
    )
    parts = {"vae": vae, "transformer": transformer, "scheduler": diffusers.CogVideoXDDIMScheduler()}
    return parts | {"tokenizer": tokenizer(), "text_encoder": t5_encoder()}


def cogvideox(vae: ModelMixin) -> tuple[Any, Call]:
    pipe = diffusers.CogVideoXPipeline(**_cogvideox_parts(vae, 16))
    call = {"prompt": PROMPT, "negative_prompt": "a", "height": 32, "width": 32, "num_frames": 9}
    return pipe, call | {"max_sequence_length": 16}


def cogvideox_image(vae: ModelMixin) -> tuple[Any, Call]:
    pipe = diffusers.CogVideoXImageToVideoPipeline(**_cogvideox_parts(vae, 32))
    call = {"image": picture(32, 32), "prompt": PROMPT, "negative_prompt": "a", "height": 32, "width": 32}
    return pipe, call | {"num_frames": 9, "max_sequence_length": 16}


def ltx_image(vae: ModelMixin) -> tuple[Any, Call]:
    transformer = diffusers.LTXVideoTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=HIDDEN,
    )
    pipe = diffusers.LTXImageToVideoPipeline(
        vae=vae, transformer=transformer, scheduler=euler(), tokenizer=tokenizer(), text_encoder=t5_encoder()
    )
    call = {"image": picture(64, 64), "prompt": PROMPT, "negative_prompt": "a", "height": 64, "width": 64}
    return pipe, call | {"num_frames": 17, "max_sequence_length": 16}


def ltx_2(vae: ModelMixin) -> tuple[Any, Call]:
    attention = {"num_attention_heads": 2, "attention_head_dim": 8}
    transformer = diffusers.LTX2VideoTransformer3DModel(
        **attention,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=16,
        rope_double_precision=False,
    )
    connectors = diffusers.pipelines.ltx2.LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=2,
        video_connector_num_learnable_registers=4,
        audio_connector_num_learnable_registers=4,
        **{f"{side}_connector_{name}": value for side in ("video", "audio") for name, value in attention.items()},
        video_connector_num_layers=1,
        audio_connector_num_layers=1,
        connector_rope_base_seq_len=32,
        rope_double_precision=False,
    )
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        dropout=0.0,
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        is_causal=True,
        mel_bins=8,
    )
    vocoder = diffusers.pipelines.ltx2.LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
    )
    pipe = diffusers.LTX2Pipeline(
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=None,
        tokenizer=None,
        connectors=connectors,
        transformer=transformer,
        vocoder=vocoder,
        scheduler=euler(),
    )
    scales = {"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0}
    guidance = scales | {f"audio_{name}": value for name, value in scales.items()}
    call = {"prompt_embeds": noise(1, 4, 32), "prompt_attention_mask": torch.ones(1, 4), **guidance}
    return pipe, call | {"height": 64, "width": 64, "num_frames": 17}


def qwen_image(vae: ModelMixin) -> tuple[Any, Call]:
    transformer = diffusers.QwenImageTransformer2DModel(
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(8, 4, 4),
    )
    pipe = diffusers.QwenImagePipeline(
        vae=vae, transformer=transformer, scheduler=euler(), text_encoder=None, tokenizer=None
    )
    call = {"prompt_embeds": noise(1, 4, HIDDEN), "prompt_embeds_mask": torch.ones(1, 4, dtype=torch.long)}
    return pipe, call | {"height": 32, "width": 32, "true_cfg_scale": 1.0}

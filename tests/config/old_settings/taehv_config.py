# ruff: noqa
# fmt: off
# A settings file in the style of the old trainer, with the keys and values in circulation (the small test, 12 frames).
# Our own text. tests/config/test_old_files.py reads it as it stands; nothing imports it.
from easydict import EasyDict
import datetime
import pytz
import os

args = EasyDict()

# ============ Model ============
args.pretrained_model_path = "checkpoints/taecvx.pth"
args.patch_size = 1
args.latent_channels = 16
args.model_dtype = "float16"

# ============ Data ============
args.data_root = "data/videos"
args.annotation_file = os.path.join("data", "annotations.json")
args.train_split = 0.9
args.dataloader_num_workers = 8
args.pin_memory = True
args.prefetch_factor = 2

# ============ Clips ============
args.height = 128
args.width = 128
args.n_frames = 12
args.min_frame_delta = 1
args.max_frame_delta = 3
args.random_crop = True
args.random_flip = True
args.color_jitter = True
args.color_jitter_params = {
    'brightness': 0.15,
    'contrast': 0.15,
    'saturation': 0.15,
    'hue': 0.08
}

# ============ Training ============
args.seed = 42
args.mixed_precision = "bf16"
args.output_dir = "output/" + datetime.datetime.now(pytz.timezone('Asia/Shanghai')).strftime("%Y-%m-%d_%H-%M-%S")
args.train_batch_size = 2
args.gradient_accumulation_steps = 2
args.gradient_checkpointing = True
args.max_train_steps = 1000
args.checkpointing_steps = 500
args.checkpoints_total_limit = 10
args.resume_from_checkpoint = None
args.learning_rate = 3e-4
args.lr_scheduler = "cosine"
args.lr_warmup_steps = 1000
args.lr_num_cycles = 1
args.optimizer = "adamw"
args.beta1 = 0.9
args.beta2 = 0.95
args.weight_decay = 1e-2
args.epsilon = 1e-8
args.max_grad_norm = 1.0

# ============ Losses ============
args.reconstruction_loss_weight = 0.1
args.encoder_loss_weight = 1.0
args.decoder_loss_weight = 1.0
args.use_seraena = True
args.seraena_loss_weight = 0.5
args.n_seraena_frames = 3
args.use_ref_vae = True
args.ref_vae_dtype = "bfloat16"
args.cogvideox_model_path = "CogVideoX-2b"

# ============ Validation ============
args.validation_steps = 500
args.num_validation_samples = 5
args.save_validation_videos = True

# ============ Logging and system ============
args.logging_dir = "logs"
args.log_every = 50
args.report_to = "tensorboard"
args.tracker_name = "taehv_training"
args.allow_tf32 = True
args.nccl_timeout = 1800
args.device_type = "cuda"
args.dataloader_pin_memory_device = "cuda"

# ============ Set by the launcher ============
args.world_size = 8
args.rank = 0
args.local_rank = 0
args.master_addr = "localhost"
args.master_port = "8000"
args.use_deepspeed = True
args.deepspeed_config_file = "accelerate_configs/deepspeed.yaml"

# ============ Switches for the cards ============

# ruff: noqa
# fmt: off
# A settings file in the style of the old trainer, with the keys and values in circulation (eight H100, 16 frames).
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
args.model_dtype = "bfloat16"

# ============ Data ============
args.data_root = "data/videos"
args.annotation_file = os.path.join("data", "annotations.json")
args.train_split = 0.95
args.dataloader_num_workers = 8
args.pin_memory = True
args.prefetch_factor = 2
args.persistent_workers = True

# ============ Clips ============
args.height = 480
args.width = 720
args.n_frames = 16
args.min_frame_delta = 1
args.max_frame_delta = 2
args.random_crop = True
args.random_flip = True
args.color_jitter = True
args.color_jitter_params = {
    'brightness': 0.15,
    'contrast': 0.15,
    'saturation': 0.15,
    'hue': 0.08
}
args.gaussian_blur = True
args.gaussian_blur_sigma = (0.1, 2.0)

# ============ Training ============
args.seed = 42
args.mixed_precision = "bf16"
args.output_dir = "output/" + datetime.datetime.now(pytz.timezone('Asia/Shanghai')).strftime("%Y-%m-%d_%H-%M-%S")
args.train_batch_size = 2
args.gradient_accumulation_steps = 8
args.gradient_checkpointing = True
args.max_train_steps = 100000
args.checkpointing_steps = 2000
args.checkpoints_total_limit = 10
args.resume_from_checkpoint = None
args.save_model_card = True
args.learning_rate = 1e-4
args.lr_scheduler = "cosine"
args.lr_warmup_steps = 2000
args.lr_num_cycles = 1
args.lr_power = 1.0
args.optimizer = "adamw"
args.beta1 = 0.9
args.beta2 = 0.95
args.weight_decay = 1e-2
args.epsilon = 1e-8
args.max_grad_norm = 1.0

# ============ Losses ============
args.reconstruction_loss_weight = 10.0
args.encoder_loss_weight = 0.1
args.decoder_loss_weight = 0.1
args.perceptual_loss_weight = 0.1
args.use_seraena = True
args.seraena_loss_weight = 0.1
args.n_seraena_frames = 1
args.use_ref_vae = True
args.ref_vae_dtype = "bfloat16"
args.cogvideox_model_path = "CogVideoX-2b"

# ============ Validation ============
args.validation_steps = 1000
args.num_validation_samples = 20
args.save_validation_videos = True
args.validation_batch_size = 2
args.early_stopping_patience = 5
args.metric_for_best_model = "psnr"

# ============ Logging and system ============
args.logging_dir = "logs"
args.log_every = 25
args.report_to = "tensorboard"
args.tracker_name = "taehv_h100_production"
args.log_predictions = True
args.allow_tf32 = True
args.nccl_timeout = 7200
args.device_type = "cuda"
args.dataloader_pin_memory_device = "cuda"
args.enable_profiler = False
args.log_system_stats = True

# ============ Set by the launcher ============
args.world_size = 8
args.rank = 0
args.local_rank = 0
args.master_addr = "localhost"
args.master_port = "29500"
args.use_deepspeed = True
args.deepspeed_config_file = "accelerate_configs/deepspeed_8gpu.yaml"

# ============ Switches for the cards ============
args.use_flash_attention = True
args.compile_model = False
args.compile_mode = "reduce-overhead"
args.enable_fused_adam = True
args.enable_xformers = True
args.gradient_as_bucket_view = True
args.static_loss_scale = 65536.0

# ============ Many machines ============
args.frames_to_trim = 3
args.use_zero3_save = True
args.zero3_save_16bit_model = True
args.communication_overlap = True
args.bucket_size_mb = 1000
args.find_unused_parameters = False
args.broadcast_buffers = True
args.ddp_bucket_cap_mb = 1000
args.gradient_compression = False
args.dataloader_drop_last = True
args.dataloader_timeout = 600
args.save_on_each_node = False
args.sync_each_batch = False
args.save_optimizer_states = True
args.use_distributed_sampler = True
args.shuffle_data = True
args.dist_backend = "nccl"
args.init_method = "env://"
args.monitor_nccl = False
args.profile_communication = False
args.check_nan_inf = False
args.auto_scale_batch_size = False
args.auto_find_batch_size = False

"""
Notes of the author stand at the end, as text.
"""

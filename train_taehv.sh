#!/usr/bin/env bash
# The plain front door: all GPUs of this machine (or the CPU where there is none), any preset.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage() {
    cat <<'TEXT'
usage: ./train_taehv.sh [PRESET_OR_FILE] [--resume PATH] [--debug] [--profile] [--help] [--key value ...]

Trains on all visible GPUs of this machine, or on the CPU where there is none. The default preset is quickstart, which
runs anywhere in minutes on clips that it makes; other presets need --data_root, the folder of your videos.
train_taehv_h100.sh says how many GPUs and machines; both take the same options.

examples:
  ./train_taehv.sh
  ./train_taehv.sh scratch --data_root /data/videos
  ./train_taehv.sh my_settings.py --data_root /data/videos --resume latest
TEXT
}

for word in "$@"; do
    if [[ "$word" == --help || "$word" == -h ]]; then usage; exit 0; fi
done
preset=quickstart
if [[ $# -ge 1 && "$1" != --* ]]; then preset="$1"; shift; fi

if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then # set but empty, or -1, hides them all
    IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES/#-1*/}"; gpus="${#visible[@]}"
elif command -v nvidia-smi >/dev/null; then
    gpus="$( { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)"
else
    gpus=0
fi
if [[ "$gpus" -eq 0 ]]; then
    gpus=1
    export USE_CPU=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}"
fi
if [[ -f "$preset" ]]; then set -- custom "$preset" "$@"; else set -- "$preset" "$@"; fi
exec "$here/train_taehv_h100.sh" "$gpus" "$@"

#!/usr/bin/env bash
# Start a training run on the GPUs of this machine, or as one of several machines.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: ./train_taehv_h100.sh GPUS CONFIG [FILE] [--resume PATH] [--debug] [--profile] [--help] [--key value ...]

  GPUS       processes on this machine, one for each GPU
  CONFIG     a preset (1gpu_h100, h100, a800, test, ...), or custom followed by a settings FILE
             (h100 on sixteen GPUs in all starts the preset 16gpu_h100)
  --resume   go on from a checkpoint: its path, its name, or latest
  --debug    log shapes, dtypes and ranges of the first step, and tell what every process and NCCL does; errors point
             at the operation that failed
  --profile  write a profiler trace (profile.json) into the run's folder
  --key      any setting of `tinyvae train`; --data_root names the folder of your videos

examples:
  ./train_taehv_h100.sh 1 1gpu_h100 --data_root /data/videos
  ./train_taehv_h100.sh 4 test --data_root /data/videos
  ./train_taehv_h100.sh 8 h100 --data_root /data/videos --resume latest
  ./train_taehv_h100.sh 8 custom my_settings.py --data_root /data/videos

several machines (the same command on each; all need the same files and a shared output folder):
  MASTER_ADDR=node1 RANK=0 ./train_taehv_h100.sh 8 h100 --data_root /data/videos      on node1
  MASTER_ADDR=node1 RANK=1 ./train_taehv_h100.sh 8 h100 --data_root /data/videos      on the second
  NNODES (2 where MASTER_ADDR is set) says how many, MASTER_PORT (29500) where they meet.

environment:
  ENGINE=ddp|deepspeed   who averages gradients and steps (ddp); or LAUNCH_CONFIG=FILE.yaml to choose a launch file
  USE_CPU=1              run GPUS processes on the CPU, where there is no GPU
  NCCL_* and OMP_*       what you set stays; --debug shows what is used
exit codes: 0 the run is complete, 2 a mistake in what was asked for (starting again does not help), 128 + n stopped by
            signal n (also by a terminal that closes, unless started with nohup) and saved, else a failure
TEXT
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ -t 2 && -z "${NO_COLOR:-}" ]]; then bold=$'\e[1m' red=$'\e[31m' plain=$'\e[0m'; else bold='' red='' plain=''; fi
say() { printf '%s%s%s\n' "$bold" "$*" "$plain" >&2 || true; } # whoever read it may be gone
refuse() { printf '%strain_taehv_h100.sh: error: %s%s\n' "$red" "$*" "$plain" >&2; exit 2; }

for word in "$@"; do
    if [[ "$word" == --help || "$word" == -h ]]; then usage; exit 0; fi
done
[[ $# -ge 2 ]] || { usage >&2; exit 2; }
trap '' PIPE # a reader of our output that ends (tee, head) must not end the run

gpus="$1" config="$2"; shift 2
[[ "$gpus" =~ ^[1-9][0-9]*$ ]] || refuse "GPUS must be a whole number of at least 1, not '$gpus'."
if [[ "$config" == custom ]]; then
    [[ $# -ge 1 && "$1" != --* ]] || refuse "custom needs a settings file: ./train_taehv_h100.sh $gpus custom FILE"
    preset="$1"; shift
else
    preset="$config"
fi

debug='' settings=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --resume) [[ $# -ge 2 ]] || refuse "--resume needs a checkpoint's path or name, or latest."
                  settings+=(--resume "$2"); shift 2 ;;
        --debug) debug=1; settings+=(--debug true); shift ;;
        --profile) settings+=(--enable_profiler true); shift ;;
        *) settings+=("$1"); shift ;;
    esac
done

# machines
if [[ -n "${MASTER_ADDR:-}" ]]; then
    nodes="${NNODES:-2}" node="${RANK:-}"
    [[ "$nodes" =~ ^[1-9][0-9]*$ ]] || refuse "NNODES must be a whole number of at least 1, not '$nodes'."
    [[ "$node" =~ ^[0-9]+$ && "$node" -lt "$nodes" ]] \
        || refuse "with MASTER_ADDR set, RANK must be this machine's number from 0 to $((nodes - 1)), not '${RANK:-}'."
else
    nodes=1 node=0
    [[ "${NNODES:-1}" == 1 ]] || refuse "NNODES=$NNODES needs MASTER_ADDR (the first machine) and RANK (this one's number)."
fi
[[ "${MASTER_PORT:-29500}" =~ ^[0-9]+$ ]] || refuse "MASTER_PORT must be a number, not '$MASTER_PORT'."
total=$((gpus * nodes))
if [[ "$config" == h100 && "$total" -eq 16 ]]; then preset=16gpu_h100; fi

# devices
if [[ -n "${USE_CPU:-}" ]]; then
    export CUDA_VISIBLE_DEVICES=''
else
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then # set but empty, or -1, hides them all
        IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES/#-1*/}"; found="${#visible[@]}"
    elif command -v nvidia-smi >/dev/null; then
        found="$( { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)"
    else
        found=0
    fi
    [[ "$found" -gt 0 ]] || refuse "no GPU is visible here. To try training on the CPU, small: \
./train_taehv.sh quickstart; to try your data and settings: tinyvae check $preset --no_step --data_root FOLDER"
    [[ "$found" -ge "$gpus" ]] || refuse "$gpus GPUs were asked for and $found are visible here; for several machines \
start it on each: MASTER_ADDR=node1 RANK=0 $0 $found $config --data_root FOLDER"
fi

# Defaults that the caller's environment overrides.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export NCCL_SOCKET_NTHREADS="${NCCL_SOCKET_NTHREADS:-4}"
export NCCL_NSOCKS_PERTHREAD="${NCCL_NSOCKS_PERTHREAD:-4}"
export NCCL_BUFFSIZE="${NCCL_BUFFSIZE:-8388608}"
export NCCL_P2P_DISABLE="${NCCL_P2P_DISABLE:-0}"
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
# Time for the emergency checkpoint after a signal; the launcher's own 30 s would cut a long step off.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-900}"
hangup=,SIGHUP
if [[ "$(trap -p HUP)" == *"''"* ]]; then hangup=''; fi # nohup: torch's launcher would take the signal all the same
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGQUIT,SIGUSR1$hangup}"
if [[ -n "$debug" ]]; then
    export NCCL_DEBUG="${NCCL_DEBUG:-INFO}" TORCH_DISTRIBUTED_DEBUG="${TORCH_DISTRIBUTED_DEBUG:-DETAIL}"
    export CUDA_LAUNCH_BLOCKING="${CUDA_LAUNCH_BLOCKING:-1}" PYTHONFAULTHANDLER=1
    env | grep -E '^(NCCL|TORCH|OMP|CUDA)_' | sort >&2
fi

# launch file
case "${ENGINE:-ddp}" in
    ddp) file=ddp_8gpu ;;
    deepspeed) if [[ "$total" -eq 1 ]]; then file=deepspeed_1gpu
               elif [[ "$total" -ge 16 ]]; then file=deepspeed_16gpu
               else file=deepspeed_8gpu; fi ;;
    *) refuse "ENGINE must be ddp or deepspeed, not '$ENGINE'." ;;
esac
launch_config="${LAUNCH_CONFIG:-$here/accelerate_configs/$file.yaml}"
[[ -f "$launch_config" ]] || refuse "there is no launch configuration '$launch_config'."

train=(-m tinyvae train "$preset" ${settings[@]+"${settings[@]}"})
if [[ "$total" -eq 1 && -z "${LAUNCH_CONFIG:-}" && "${ENGINE:-ddp}" == ddp ]]; then
    command=("${PYTHON:-python}" "${train[@]}") # one process needs no launcher
else
    launch_config="$(cd "$(dirname "$launch_config")" && pwd)/$(basename "$launch_config")"
    command=("${PYTHON:-python}" -m tinyvae.training.launch accelerate launch --config_file "$launch_config"
        --num_processes "$total" --num_machines "$nodes" --machine_rank "$node"
        --main_process_port "${MASTER_PORT:-29500}")
    if [[ "$nodes" -gt 1 ]]; then command+=(--main_process_ip "$MASTER_ADDR"); fi
    command+=("${train[@]}")
fi
# What the settings have wrong is said once, by one process, before GPUS of them say it.
"${PYTHON:-python}" -m tinyvae check "$preset" --quick --launch "$launch_config" ${settings[@]+"${settings[@]}"} || exit 2
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR # the launcher's to set

say "$total process$([[ "$total" -eq 1 ]] || echo es) on $nodes machine$([[ "$nodes" -eq 1 ]] || echo s), preset $preset"
say "${command[*]}"

exec "${command[@]}" </dev/null # it answers signals and sets the exit code itself

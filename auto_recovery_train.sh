#!/usr/bin/env bash
# Keep a training run going: start it, and after a failure start it again from its newest intact checkpoint.
set -uo pipefail
set -m # the run gets its own process group, so a signal to our group reaches it once, through us

usage() {
    cat <<'TEXT'
usage: ./auto_recovery_train.sh GPUS CONFIG [FILE] [options of train_taehv_h100.sh]

Starts ./train_taehv_h100.sh with the same words. When the run fails, this script starts it again from the newest intact
checkpoint of its own run folder, after a pause that doubles each time. It does not start it again after success, after a
mistake in the settings (exit code 2), or when this script itself gets a signal (SIGTERM, SIGINT, SIGUSR1, and SIGHUP of
a terminal that closes unless nohup started it). It passes the signal on, so that the run can save.

The run folder is RUN_DIR, or --output_dir, or output/recovery_CONFIG_TIME. If it already holds checkpoints, the run goes
on from them, so a job that a scheduler starts again with the same RUN_DIR continues by itself. On several machines give
all of them the same RUN_DIR on a shared disk.

environment: MAX_RESTARTS (10) restarts without any progress between them, PAUSE_S (15) before the first restart,
             MAX_PAUSE_S (600), and everything that train_taehv_h100.sh reads
example:     RUN_DIR=output/h100 ./auto_recovery_train.sh 8 h100 --data_root /data/videos
TEXT
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
launcher="${TRAIN_LAUNCHER:-$here/train_taehv_h100.sh}"
if [[ -t 2 && -z "${NO_COLOR:-}" ]]; then bold=$'\e[1m' plain=$'\e[0m'; else bold='' plain=''; fi
say() { printf '%sauto_recovery_train.sh: %s%s\n' "$bold" "$*" "$plain" >&2; }
refuse() { say "error: $*"; exit 2; }

for word in "$@"; do
    if [[ "$word" == --help || "$word" == -h ]]; then usage; exit 0; fi
done
[[ $# -ge 2 ]] || { usage >&2; exit 2; }
trap '' PIPE # a reader of our output that ends (tee, head) must not end us: the run would go on without us

max_restarts="${MAX_RESTARTS:-10}" pause="${PAUSE_S:-15}" max_pause="${MAX_PAUSE_S:-600}"
for name in MAX_RESTARTS PAUSE_S MAX_PAUSE_S; do
    [[ "${!name:-0}" =~ ^[0-9]+$ ]] || refuse "$name must be a whole number, not '${!name}'."
done
words=() resume='' base="${RUN_DIR:-}"
config="$2"
while [[ $# -gt 0 ]]; do
    case "$1" in
        --resume|--resume_from_checkpoint) [[ $# -ge 2 ]] || refuse "$1 needs a value."; resume="$2"; shift 2 ;;
        --output_dir) [[ $# -ge 2 ]] || refuse "$1 needs a value."; base="$2"; shift 2 ;;
        --resume=*|--resume_from_checkpoint=*) resume="${1#*=}"; shift ;;
        --output_dir=*) base="${1#*=}"; shift ;;
        *) words+=("$1"); shift ;;
    esac
done
[[ "$base" != *%[YmdHMS]* ]] ||
    refuse "RUN_DIR or --output_dir must name one folder, without %Y to %S ('$base'): a restart looks there for checkpoints."
base="${base:-output/recovery_$(basename "$config" .py)_$(date +%Y-%m-%d_%H-%M-%S)}"

# The newest checkpoint whose every file is as it was written; nothing where there is none.
newest() {
    compgen -G "$base/*checkpoint-*" >/dev/null || compgen -G "$base/attempt_*/*checkpoint-*" >/dev/null || return 0
    "${PYTHON:-python}" - "$base" <<'PYTHON'
import sys
from pathlib import Path
from tinyvae.training.checkpoint import newest_intact
base = Path(sys.argv[1])
found, damaged = newest_intact([base, *base.glob("attempt_*")])
for fault in damaged:
    print("passing over a damaged checkpoint:", fault, file=sys.stderr)
print(found if found is not None else "")
PYTHON
}

# Pass a signal on; the run itself tells a first signal from a second one.
child='' stopping=''
pass_on() { stopping="$1"; [[ -z "$child" ]] || kill -s "$1" "$child" 2>/dev/null; }
for name in TERM INT USR1 HUP; do trap "pass_on $name" "$name"; done

restarts=0 last_checkpoint=''
checkpoint="$(newest)" || { say "the checkpoints of $base cannot be looked at; is tinyvae installed?"; exit 2; }
while :; do
    if [[ -n "$stopping" ]]; then say "stopped by SIG$stopping"; exit $((128 + $(kill -l "$stopping"))); fi
    from=()
    if [[ -n "$checkpoint" ]]; then
        folder="$(dirname "$checkpoint")" from=(--resume "$checkpoint")
        say "going on from $checkpoint"
    else
        # A folder in which a run died before its first checkpoint is not written over.
        folder="$base" attempt=1
        while [[ -e "$folder/config.json" ]]; do attempt=$((attempt + 1)); folder="$base/attempt_$attempt"; done
        if [[ -n "$resume" ]]; then from=(--resume "$resume"); fi
    fi

    "$launcher" "${words[@]}" ${from[@]+"${from[@]}"} --output_dir "$folder" </dev/null &
    child=$!
    wait "$child"; code=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done # a signal ends `wait` before the child ends
    child=''
    if [[ "$code" -eq 0 ]]; then say "the run is complete: $folder"; exit 0; fi
    if [[ -n "$stopping" ]]; then
        say "to go on with this run: the same command with RUN_DIR=$base"
        exit $((128 + $(kill -l "$stopping")))
    fi
    if [[ "$code" -eq 2 ]]; then say "the message above needs an answer: starting again would not help"; exit 2; fi

    checkpoint="$(newest)" || { say "the checkpoints of $base cannot be looked at"; exit "$code"; }
    if [[ "$checkpoint" != "$last_checkpoint" ]]; then # it got further than before: the count starts again
        restarts=0 pause="${PAUSE_S:-15}" last_checkpoint="$checkpoint"
    fi
    restarts=$((restarts + 1))
    if [[ "$restarts" -gt "$max_restarts" ]]; then
        say "gave up after $max_restarts restarts without progress (last exit code $code); see $folder/train.log"
        exit "$code"
    fi
    say "failed with exit code $code; restart $restarts of $max_restarts in $pause s"
    sleep "$pause" & child=$!; wait "$child"; child=''
    pause=$((pause * 2 > max_pause ? max_pause : pause * 2))
done

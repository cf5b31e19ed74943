#!/usr/bin/env bash
# Be told how a run ended, or that it stands still:  tinyvae train h100 ... --notify_command examples/notify.sh
# tinyvae sets TINYVAE_EVENT (finished, early_stop, stopped, failed or stalled), TINYVAE_REASON, TINYVAE_RUN and others.
# WEBHOOK: an address that takes JSON {"text": "..."}; MAIL_TO: an address for `mail`. Without either a file is written.
set -euo pipefail

text="tinyvae $TINYVAE_EVENT at step $TINYVAE_STEP of $TINYVAE_MAX_STEPS: $TINYVAE_REASON
$TINYVAE_RUN on $(uname -n); best $TINYVAE_METRIC: ${TINYVAE_BEST:-none yet}"

if [[ -n "${WEBHOOK:-}" ]]; then # Python writes the JSON: a reason may hold quotes and several lines
    python3 -c 'import json, sys; print(json.dumps({"text": sys.argv[1]}))' "$text" \
        | curl --fail --silent --show-error --max-time 30 -H 'Content-Type: application/json' --data @- "$WEBHOOK"
fi
if [[ -n "${MAIL_TO:-}" ]]; then
    mail -s "tinyvae $TINYVAE_EVENT: $(basename "$TINYVAE_RUN")" "$MAIL_TO" <<<"$text"
fi
if [[ -z "${WEBHOOK:-}${MAIL_TO:-}" ]]; then
    printf '%s\n' "$text" >>"$TINYVAE_RUN/notifications.txt"
fi

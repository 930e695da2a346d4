#!/usr/bin/env bash
# Say where the results of a run lie: show_run.sh RUN_DIRECTORY. Names only what is there.
set -euo pipefail

run=$1
show() {
    local label=$1 path
    shift
    for path in "$@"; do
        if [ -e "$path" ]; then printf '  %-16s %s\n' "$label" "$path"; fi
    done
}

echo
echo "The run is in $run:"
show "curves" "$run"/curves.png
show "expert load" "$run"/experts.png
show "metrics" "$run"/metrics.jsonl
show "checkpoints" "$run"/checkpoints
show "resolved config" "$run"/config.yaml

#!/usr/bin/env bash
# Wait for the end of process PID, however it ends, and then stop the cluster in DIR. Ends by itself when DIR is removed.
#   keep.sh DIR PID
set -uo pipefail
DIR=$1 PID=$2
starttime() { local s; s=$(cat "/proc/$PID/stat" 2>/dev/null) && s=${s##*) } && set -- $s && [ "$1" != Z ] && echo "${20}"; }
first=$(starttime)
while [ -n "$first" ] && [ "$(starttime)" = "$first" ]; do
    [ -d "$DIR" ] || exit 0
    sleep 1
done
sleep 2 # for a start that is being given up
bash "$(dirname "$0")/stop.sh" "$DIR"
rm -rf "$DIR"

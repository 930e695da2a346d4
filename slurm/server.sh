# Sourced by rl.sbatch, distill.sbatch and serve.sbatch behind environment.sh: a rollout server beside the ranks, or the
# server of another job. See docs/slurm.md.
#
# Variables, all optional:
#   K3_SERVE          a checkpoint or run: `k3train serve` is started with it, and the ranks take their rollouts from there
#   K3_SERVE_COMMAND  instead, a command line for bash that starts another server; it finds K3_SERVE_HOST and K3_SERVE_PORT
#   K3_SERVE_JOB      instead, the id of a job of slurm/serve.sbatch
#   K3_SERVE_NODE     the server's node; the job's last, which the ranks then leave alone where the job has several
#   K3_SERVE_PORT     its port; follows from the job's id
#   K3_SERVE_SECONDS  the longest it may take to answer; 900
# Without any of them rollouts are made by the ranks themselves (rl.rollout.engine=local).

k3_server= k3_server_failed=0

k3_server_note() { echo "${K3_NOTES:-$K3_ROOT/.k3train-jobs}/server-$1"; } # JOB: the file with its server's address

k3_answers() { # HOST PORT: whether /health answers 200
    local line
    line=$( { exec 3<>"/dev/tcp/$1/$2" && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 && IFS= read -r -t 5 line <&3 && echo "$line"; } 2>/dev/null)
    [[ $line == *" 200"* ]]
}

# Start the server as a job step in the background: sets k3_server, K3_SERVE_HOST and K3_SERVE_PORT.
k3_start_server() {
    local node=${K3_SERVE_NODE:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)} id=${SLURM_JOB_ID}
    K3_SERVE_HOST=$(k3_python "$node" -c 'import sys; from k3train.environment import address_of; print(address_of(sys.argv[1]))' "$node") ||
        k3_fail "the address of $node is not known; see K3_PYTHON."
    K3_SERVE_PORT=${K3_SERVE_PORT:-$((18000 + id % 2000))}
    k3_count K3_SERVE_PORT "$K3_SERVE_PORT"
    export K3_SERVE_HOST K3_SERVE_PORT
    # The ranks leave its node alone, where there is another.
    if [ "$SLURM_NNODES" -gt 1 ]; then
        [ -n "${K3_NODES:-}" ] || k3_nodes=$((k3_nodes - 1))
        [ "$k3_nodes" -lt "$SLURM_NNODES" ] || k3_fail "K3_NODES=$k3_nodes leaves no node of $SLURM_NNODES to the server; allowed: up to $((SLURM_NNODES - 1))."
    fi
    # --overlap: the server's CPUs and GPUs are no step's own, as the ranks' step would else wait for it to end.
    local options=("${k3_srun[@]}" --overlap "--nodelist=$node" --nodes=1 --ntasks=1 "--cpus-per-task=$SLURM_CPUS_ON_NODE")
    if [ -n "${K3_SERVE_COMMAND:-}" ]; then
        srun "${options[@]}" bash -c "$K3_SERVE_COMMAND" &
    else
        srun "${options[@]}" "$K3_PYTHON" -m k3train serve --checkpoint "$K3_SERVE" --host "$K3_SERVE_HOST" \
            --port "$K3_SERVE_PORT" --allow-updates &
    fi
    k3_server=$!
    k3_say "the server starts on $node: http://${K3_SERVE_HOST}:$K3_SERVE_PORT"
    if [ "$SLURM_NNODES" -gt 1 ]; then k3_leave_out "$node"; fi
}

k3_leave_out() { # NODE: one more that the ranks' step does not use
    local i
    for i in "${!k3_srun[@]}"; do
        case ${k3_srun[i]} in --exclude=*) k3_srun[i]+=,$1 && return ;; esac
    done
    k3_srun+=("--exclude=$1")
}

# Wait until the server answers; fails where its step ends, it takes too long, or the job is told to stop.
k3_await_server() {
    local until=$((SECONDS + ${K3_SERVE_SECONDS:-900}))
    until k3_answers "$K3_SERVE_HOST" "$K3_SERVE_PORT"; do
        [ "$k3_stop" = 0 ] || return 1
        if ! kill -0 "$k3_server" 2>/dev/null; then k3_say "the server ended before it answered"; return 1; fi
        if [ "$SECONDS" -ge "$until" ]; then k3_say "the server does not answer after ${K3_SERVE_SECONDS:-900} s"; return 1; fi
        sleep 1
    done
    k3_say "the server answers"
}

# The address that another job wrote, as K3_SERVE_URL.
k3_find_server() {
    local note until=$((SECONDS + ${K3_SERVE_SECONDS:-900}))
    note=$(k3_server_note "$K3_SERVE_JOB")
    until [ -s "$note" ]; do
        [ "$k3_stop" = 0 ] || return 1
        [ "$SECONDS" -lt "$until" ] || { k3_say "job $K3_SERVE_JOB wrote no address to $note in ${K3_SERVE_SECONDS:-900} s"; return 1; }
        sleep 1
    done
    K3_SERVE_URL=$(<"$note")
}

k3_before_ranks() { # called by k3_run
    [ -n "${K3_SERVE:-}${K3_SERVE_COMMAND:-}${K3_SERVE_JOB:-}" ] || return 0
    if [ -n "${K3_SERVE_JOB:-}" ]; then
        k3_find_server || k3_server_failed=1
    else
        k3_start_server
        k3_await_server || k3_server_failed=1
        case $K3_SERVE_HOST in *:*) K3_SERVE_URL="http://[$K3_SERVE_HOST]:$K3_SERVE_PORT" ;; *) K3_SERVE_URL="http://$K3_SERVE_HOST:$K3_SERVE_PORT" ;; esac
    fi
    k3_keys+=(rl.rollout.engine=openai "rl.rollout.url=$K3_SERVE_URL")
    # Nobody starts the job's own server again: waiting long for it would waste the job's time.
    [ -n "${K3_SERVE_JOB:-}" ] || case " ${k3_keys[*]} " in
        *" rl.rollout.outage_minutes="*) ;;
        *) k3_keys+=(rl.rollout.outage_minutes=1) ;;
    esac
    if [ "$k3_server_failed" = 1 ]; then
        k3_end_server
        k3_code=1
        [ "$k3_stop" = 1 ] || k3_failed 1
    fi
}

k3_end_server() {
    [ -n "$k3_server" ] || return 0
    kill -TERM "$k3_server" 2>/dev/null
    wait "$k3_server" 2>/dev/null
    k3_server=
}

k3_after_ranks() { # called by k3_run
    # Ranks that lose their server end as with a wrong recipe (2); the job is worth another start.
    if [ -n "$k3_server" ] && ! kill -0 "$k3_server" 2>/dev/null && [ "$k3_code" = 2 ]; then
        k3_say "the server ended before the ranks"
        k3_code=1
    fi
    k3_end_server
}

# A job that is nothing but a server: until its end, or a stop request.
k3_serve_only() {
    local note
    note=$(k3_server_note "$SLURM_JOB_ID")
    [ -n "${K3_SERVE:-}${K3_SERVE_COMMAND:-}" ] || k3_fail "K3_SERVE names no checkpoint to serve; set it, or K3_SERVE_COMMAND."
    k3_layout
    k3_start_server
    k3_await_server || { k3_end_server; [ "$k3_stop" = 1 ] && exit 0; exit 1; }
    mkdir -p "${note%/*}" || k3_fail "${note%/*} cannot be made; set K3_NOTES to a folder that all nodes can write."
    case $K3_SERVE_HOST in *:*) echo "http://[$K3_SERVE_HOST]:$K3_SERVE_PORT" ;; *) echo "http://$K3_SERVE_HOST:$K3_SERVE_PORT" ;; esac >"$note"
    while kill -0 "$k3_server" 2>/dev/null && [ "$k3_stop" = 0 ]; do wait "$k3_server"; done
    rm -f "$note"
    if [ "$k3_stop" = 1 ]; then k3_end_server; exit 0; fi
    wait "$k3_server"
    k3_fail "the server ended by itself; see above."
}

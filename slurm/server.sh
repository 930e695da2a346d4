# Sourced by rl.sbatch, distill.sbatch and serve.sbatch behind environment.sh: a rollout server beside the ranks, or the
# server of another job. See docs/slurm.md.
#
# Variables, all optional:
#   K3_SERVE          a checkpoint or run: `k3train serve` is started with it, and the ranks take their rollouts from there
#   K3_SERVE_COMMAND  instead, a command line for bash that starts another server; it finds K3_SERVE_HOST and K3_SERVE_PORT
#   K3_SERVE_JOB      instead, the id of a job of slurm/serve.sbatch
#   K3_TEACHERS       checkpoints or runs, parted by spaces: a server that scores for each, the first for rl.teachers.0; - leaves one out
#   K3_SERVE_NODE     the servers' node; the job's last good one, which the ranks then leave alone where the job has several
#   K3_SERVE_PORT     its port, before the teachers'; follows from the job's id
#   K3_SERVE_SECONDS  the longest it may take to answer; 900
# Without K3_SERVE, K3_SERVE_COMMAND and K3_SERVE_JOB rollouts are made by the ranks themselves (rl.rollout.engine=local).

k3_servers=() k3_ports=() k3_server_failed=0 # process ids of the steps, and their ports

k3_server_note() { echo "${K3_NOTES:-$K3_ROOT/.k3train-jobs}/server-$1"; } # JOB: the file with its server's address

k3_answers() { # HOST PORT: whether /health answers 200
    local line
    line=$( { exec 3<>"/dev/tcp/$1/$2" && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 && IFS= read -r -t 5 line <&3 && echo "$line"; } 2>/dev/null)
    [[ $line == *" 200"* ]]
}

# Whether this job starts servers of its own.
k3_has_servers() { [ -n "${K3_SERVE:-}${K3_SERVE_COMMAND:-}${K3_TEACHERS:-}" ]; }

# Servers have a node of their own where the job has several: one less for the ranks, one more that has to be good.
k3_servers_layout() { # called by k3_run behind k3_layout
    k3_has_servers && [ "$SLURM_NNODES" -gt 1 ] || return 0
    [ -n "${K3_NODES:-}" ] || k3_nodes=$((k3_nodes - 1))
    [ "$k3_nodes" -lt "$SLURM_NNODES" ] || k3_fail "K3_NODES=$k3_nodes leaves no node of $SLURM_NNODES to the server; allowed: up to $((SLURM_NNODES - 1))."
    k3_more_nodes=1
}

# The job's last node that the check has not found bad.
k3_last_node() {
    local node last='' bad=,
    for node in "${k3_srun[@]}"; do case $node in --exclude=*) bad+=${node#--exclude=}, ;; esac; done
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do case $bad in *",$node,"*) ;; *) last=$node ;; esac; done
    echo "$last"
}

k3_url() { # HOST PORT
    case $1 in *:*) echo "http://[$1]:$2" ;; *) echo "http://$1:$2" ;; esac
}

# Start a server as a job step in the background: adds to k3_servers and k3_ports. Servers of one node have a GPU each.
k3_start_step() { # NODE PORT WHAT COMMAND...
    local node=$1 port=$2 what=$3
    shift 3
    # --overlap: a server's CPUs and GPUs are no step's own, as the ranks' step would else wait for it to end.
    local options=("${k3_srun[@]}" --overlap "--nodelist=$node" --nodes=1 --ntasks=1 "--cpus-per-task=$SLURM_CPUS_ON_NODE")
    if [ -n "${K3_TEACHERS:-}" ] && [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
        CUDA_VISIBLE_DEVICES=$((${#k3_servers[@]} % SLURM_GPUS_ON_NODE)) srun "${options[@]}" "$@" &
    else
        srun "${options[@]}" "$@" &
    fi
    k3_servers+=($!) k3_ports+=("$port")
    k3_say "$what starts on $node: $(k3_url "$K3_SERVE_HOST" "$port")"
}

# Start this job's servers: the rollouts', which has the port K3_SERVE_PORT, and the teachers', which have the next ones.
k3_start_servers() {
    local node id=${SLURM_JOB_ID} teacher number=0 serve=("$K3_PYTHON" -m k3train serve)
    node=${K3_SERVE_NODE:-$(k3_last_node)}
    K3_SERVE_HOST=$(k3_python "$node" -c 'import sys; from k3train.environment import address_of; print(address_of(sys.argv[1]))' "$node") ||
        k3_fail "the address of $node is not known; see K3_PYTHON."
    K3_SERVE_PORT=${K3_SERVE_PORT:-$((18000 + id % 2000))}
    k3_count K3_SERVE_PORT "$K3_SERVE_PORT"
    export K3_SERVE_HOST K3_SERVE_PORT
    if [ -n "${K3_SERVE_COMMAND:-}" ]; then
        k3_start_step "$node" "$K3_SERVE_PORT" "the server" bash -c "$K3_SERVE_COMMAND"
    elif [ -n "${K3_SERVE:-}" ]; then
        k3_start_step "$node" "$K3_SERVE_PORT" "the server" "${serve[@]}" --checkpoint "$K3_SERVE" --host "$K3_SERVE_HOST" \
            --port "$K3_SERVE_PORT" --allow-updates
    fi
    for teacher in ${K3_TEACHERS:-}; do
        if [ "$teacher" != - ]; then
            local port=$((K3_SERVE_PORT + number + 1))
            k3_start_step "$node" "$port" "the server of rl.teachers.$number" "${serve[@]}" --checkpoint "$teacher" \
                --host "$K3_SERVE_HOST" --port "$port"
            k3_keys+=("rl.teachers.$number.checkpoint=null" "rl.teachers.$number.url=$(k3_url "$K3_SERVE_HOST" "$port")")
        fi
        number=$((number + 1))
    done
    if [ "$SLURM_NNODES" -gt 1 ]; then k3_leave_out "$node"; fi
}

k3_leave_out() { # NODE: one more that the ranks' step does not use
    local i
    for i in "${!k3_srun[@]}"; do
        case ${k3_srun[i]} in --exclude=*) k3_srun[i]+=,$1 && return ;; esac
    done
    k3_srun+=("--exclude=$1")
}

# Wait until all servers answer; fails where a step ends, it takes too long, or the job is told to stop.
k3_await_servers() {
    local until=$((SECONDS + ${K3_SERVE_SECONDS:-900})) i
    for i in "${!k3_servers[@]}"; do
        until k3_answers "$K3_SERVE_HOST" "${k3_ports[i]}"; do
            [ "$k3_stop" = 0 ] || return 1
            if ! kill -0 "${k3_servers[i]}" 2>/dev/null; then k3_say "the server ended before it answered"; return 1; fi
            if [ "$SECONDS" -ge "$until" ]; then k3_say "the server does not answer after ${K3_SERVE_SECONDS:-900} s"; return 1; fi
            sleep 1
        done
    done
    k3_say "the server answers"
}

# The address that another job wrote, as K3_SERVE_URL. A job that has ended writes none; one that waits in the queue is no
# failure of this one, which then waits there too.
k3_find_server() {
    local note state until=$((SECONDS + ${K3_SERVE_SECONDS:-900}))
    note=$(k3_server_note "$K3_SERVE_JOB")
    until [ -s "$note" ]; do
        [ "$k3_stop" = 0 ] || return 1
        state=$(scontrol show job -o "$K3_SERVE_JOB" 2>/dev/null | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p')
        case $state in
            COMPLETED | CANCELLED | FAILED | TIMEOUT | NODE_FAIL | OUT_OF_MEMORY | DEADLINE | BOOT_FAIL)
                k3_fail "K3_SERVE_JOB=$K3_SERVE_JOB has ended ($state); hand in another slurm/serve.sbatch, and this job with its id." ;;
        esac
        if [ "$SECONDS" -ge "$until" ]; then
            k3_say "job $K3_SERVE_JOB wrote no address to $note in ${K3_SERVE_SECONDS:-900} s"
            [ "$state" != PENDING ] || k3_requeue "the server's job $K3_SERVE_JOB is still pending"
            return 1
        fi
        sleep 1
    done
    K3_SERVE_URL=$(<"$note")
}

k3_before_ranks() { # called by k3_run
    if k3_has_servers; then
        k3_start_servers
        k3_await_servers || k3_server_failed=1
    fi
    if [ -n "${K3_SERVE:-}${K3_SERVE_COMMAND:-}" ]; then
        K3_SERVE_URL=$(k3_url "$K3_SERVE_HOST" "$K3_SERVE_PORT")
    elif [ -n "${K3_SERVE_JOB:-}" ] && [ "$k3_server_failed" = 0 ]; then
        k3_find_server || k3_server_failed=1
    fi
    [ -z "${K3_SERVE_URL:-}" ] || k3_keys+=(rl.rollout.engine=openai "rl.rollout.url=$K3_SERVE_URL")
    # Nobody starts a server of this job again: waiting long for it would waste the job's time.
    if k3_has_servers; then
        case " ${k3_keys[*]} " in
            *" rl.rollout.outage_minutes="*) ;;
            *) k3_keys+=(rl.rollout.outage_minutes=1) ;;
        esac
    fi
    if [ "$k3_server_failed" = 1 ]; then
        k3_end_servers
        k3_code=1
        [ "$k3_stop" = 1 ] || k3_failed 1
    fi
}

k3_end_servers() {
    local server
    for server in ${k3_servers[@]+"${k3_servers[@]}"}; do kill -TERM "$server" 2>/dev/null; done
    for server in ${k3_servers[@]+"${k3_servers[@]}"}; do wait "$server" 2>/dev/null; done
    k3_servers=()
}

# Whether a server that the ranks need is gone: a step of this job that has ended, another job's that does not answer.
k3_lost_server() {
    local server address
    for server in ${k3_servers[@]+"${k3_servers[@]}"}; do kill -0 "$server" 2>/dev/null || return 0; done
    [ -n "${K3_SERVE_JOB:-}" ] && [ -z "${K3_SERVE:-}${K3_SERVE_COMMAND:-}" ] && [ -n "${K3_SERVE_URL:-}" ] || return 1
    address=${K3_SERVE_URL#http://}
    local host=${address%:*}
    host=${host#[} host=${host%]}
    ! k3_answers "$host" "${address##*:}"
}

k3_after_ranks() { # called by k3_run
    # Ranks that lose their server end as with a wrong recipe (2); the job is worth another start.
    if [ "$k3_code" = 2 ] && k3_lost_server; then
        k3_say "the server ended before the ranks"
        k3_code=1
    fi
    k3_end_servers
}

# A job that is nothing but a server: until it is cancelled. Near its time limit it requeues itself, and after a failure.
k3_serve_only() {
    local note
    note=$(k3_server_note "$SLURM_JOB_ID")
    [ -n "${K3_SERVE:-}${K3_SERVE_COMMAND:-}" ] || k3_fail "K3_SERVE names no checkpoint to serve; set it, or K3_SERVE_COMMAND."
    [ -z "${K3_TEACHERS:-}" ] || k3_fail "K3_TEACHERS is for rl.sbatch and distill.sbatch; a job of serve.sbatch has one server: set K3_SERVE."
    k3_layout
    rm -f "$note"
    k3_code=1
    k3_start_servers
    if k3_await_servers; then
        mkdir -p "${note%/*}" || k3_fail "${note%/*} cannot be made; set K3_NOTES to a folder that all nodes can write."
        k3_url "$K3_SERVE_HOST" "$K3_SERVE_PORT" >"$note"
        local answered=$SECONDS
        while kill -0 "${k3_servers[0]}" 2>/dev/null && [ "$k3_stop" = 0 ]; do wait "${k3_servers[0]}"; done
        # Long enough for a failure now to be another one.
        [ $((SECONDS - answered)) -lt "${K3_SERVE_SECONDS:-900}" ] || rm -f "$k3_note_dir/failures"
    fi
    rm -f "$note"
    if [ "$k3_stop" = 1 ]; then
        k3_end_servers
        k3_code=0
        k3_requeue "the server was told to stop"
        k3_end 0
    fi
    wait "${k3_servers[0]}"
    k3_say "the server ended by itself; see above."
    k3_failed 1
}

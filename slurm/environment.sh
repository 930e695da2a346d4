# Sourced by every .sbatch file: where things are, how the ranks start, what happens on a signal. See docs/slurm.md.
#
# Variables, all optional:
#   K3_ROOT            the checkout; the directory sbatch was called in
#   K3_SITE            the site file; $K3_ROOT/slurm/site.sh
#   K3_PYTHON          the Python to start; $K3_ROOT/.venv/bin/python
#   K3_RECIPE          the recipe, where no recipe=... is given
#   K3_LAUNCHER        srun (one task a rank; default) or torchrun (one agent a node)
#   K3_RANKS_PER_NODE  ranks a node; its GPUs, else --ntasks-per-node, else 1
#   K3_CPUS_PER_RANK   CPUs a rank under srun; what the node's ranks can share out evenly
#   K3_NODES           nodes to train on; all. With fewer than --nodes the rest are spares for nodes that fail the check
#   K3_SRUN_OPTIONS    more options of every srun, such as a container's
#   K3_SWEEP           a file with one line of recipe keys for each task of a job array
#   K3_HEALTH_CHECK    1: check every node before training (default), 0: do not
#   K3_HEALTH_OPTIONS  options of the check, such as --min-free-gb 500 (python -m k3train.health --help)
#   K3_HEALTH_COMMAND  one more check, a command line for bash on each node; what fails it is not trained on
#   K3_HEALTH_SECONDS  the longest the check may take; 300
#   K3_MAX_REQUEUES    how often a job may start anew; 1000
#   K3_MAX_FAILURES    failures in a row, without a newer checkpoint or a stop between, after which a job no longer
#                      requeues itself; 3, 0: none is forgiven
#   K3_RETRY_SECONDS   seconds between five tries to have this job requeued, where Slurm's controller does not answer; 5
#   K3_NOTES           a folder that all nodes share, for what they tell each other; $K3_ROOT/.k3train-jobs
#   K3_EXIT_WAIT       seconds the other ranks have once one has ended; 180
#   K3_REPEAT_SECONDS  seconds between two tellings of a stop request, until the ranks have ended; 5
#   K3_MASTER_ADDR     where the ranks meet; the first node's name, or its NodeAddr where the name does not resolve
set -uo pipefail

k3_say() { echo "[$(date +%FT%T)] k3train job ${SLURM_JOB_ID:-?}: $*"; }

k3_fail() {
    k3_say "$*" >&2
    exit 2
}

K3_ROOT=${K3_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
[ -f "$K3_ROOT/slurm/environment.sh" ] ||
    k3_fail "K3_ROOT=$K3_ROOT is not a k3train checkout; call sbatch from its root, or set K3_ROOT."
K3_SITE=${K3_SITE:-$K3_ROOT/slurm/site.sh}
# shellcheck source=/dev/null
if [ -f "$K3_SITE" ]; then source "$K3_SITE"; fi
if declare -F k3_site_setup >/dev/null; then k3_site_setup || k3_fail "k3_site_setup of $K3_SITE failed."; fi
K3_PYTHON=${K3_PYTHON:-$K3_ROOT/.venv/bin/python}
cd "$K3_ROOT" || k3_fail "K3_ROOT=$K3_ROOT cannot be entered."
[ -n "${SLURM_JOB_ID:-}" ] || k3_fail "this is no Slurm job; hand it in with slurm/submit or sbatch."
case ${K3_LAUNCHER:=srun} in srun | torchrun) ;; *) k3_fail "K3_LAUNCHER=$K3_LAUNCHER is not known; set srun or torchrun." ;; esac

# This job's own name. A task of an array may have the array's id as its SLURM_JOB_ID, which means all tasks to scontrol.
k3_job() {
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; else echo "$SLURM_JOB_ID"; fi
}

# What the runs of one job tell each other: the ranks' exit note, failures in a row, the nodes' health.
k3_note_dir=${K3_NOTES:-$K3_ROOT/.k3train-jobs}/${SLURM_CLUSTER_NAME:-slurm}-$(k3_job)

k3_count() { # NAME VALUE: VALUE must be a whole number
    case $2 in '' | *[!0-9]*) k3_fail "$1=$2 is not a whole number; set it to one, or leave it out." ;; esac
}

k3_layout() { # sets k3_ranks (a node), k3_nodes and k3_srun, the options of every job step
    k3_ranks=${K3_RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-${SLURM_NTASKS_PER_NODE:-1}}}
    k3_nodes=${K3_NODES:-$SLURM_NNODES}
    k3_more_nodes=0 # beside the ranks'
    k3_count K3_RANKS_PER_NODE "$k3_ranks"
    k3_count K3_NODES "$k3_nodes"
    [ "$k3_nodes" -ge 1 ] && [ "$k3_nodes" -le "$SLURM_NNODES" ] ||
        k3_fail "K3_NODES=$k3_nodes, but the job has $SLURM_NNODES nodes; allowed: 1 to $SLURM_NNODES; ask for more with --nodes."
    read -ra k3_srun <<<"${K3_SRUN_OPTIONS:-}"
    k3_srun+=(--export=ALL --kill-on-bad-exit=0) # a rank that has written its checkpoint must not end one that is about to
    if [ -n "${K3_MASTER_ADDR:-}" ]; then export MASTER_ADDR=$K3_MASTER_ADDR; fi
}

# Wait for a job step in the background; its exit code is k3_code. Stop requests are passed on to it. A signal ends
# `wait` early.
k3_wait() {
    local again
    k3_step=$1
    [ "$k3_stop" = 0 ] || k3_pass_on # it came while the step was being started
    while :; do
        wait "$k3_step"
        k3_code=$?
        kill -0 "$k3_step" 2>/dev/null || break
    done
    # Where the step ended while a signal was handled, its own code is still to be had.
    wait "$k3_step" 2>/dev/null
    again=$?
    [ "$again" = 127 ] || k3_code=$again
    k3_step=
    if [ -n "$k3_teller" ]; then kill "$k3_teller" 2>/dev/null || :; fi
    k3_teller=
}

# What a signal to the batch shell means: the time limit is near (--signal=B:USR1@...), or Slurm ends this start (TERM).
k3_step= k3_stop=0 k3_teller=
k3_on_signal() {
    k3_stop=1
    k3_say "told to stop ($1): the step ends, a checkpoint is written"
    [ -z "$k3_step" ] || k3_pass_on
}

# Tell the step to stop, again and again until it has ended: what comes before a rank listens is lost (srun starting its
# tasks, torchrun's agent, whose ranks ignore signals until they have read their modules). To a rank a repeat is nothing.
k3_pass_on() {
    kill -USR1 "$k3_step" 2>/dev/null || :
    [ -z "$k3_teller" ] || return 0
    (
        trap - USR1 TERM
        while sleep "${K3_REPEAT_SECONDS:-5}" && kill -USR1 "$k3_step"; do :; done
    ) </dev/null >/dev/null 2>&1 &
    k3_teller=$!
}
trap 'k3_on_signal SIGUSR1' USR1
trap 'k3_on_signal SIGTERM' TERM

# Put this job back into the queue, without the nodes given, and exit. Returns where that is not possible.
k3_requeue() { # WHY [NODES]
    local state='' excluded answer='' try
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "${K3_MAX_REQUEUES:-1000}" ]; then
        k3_say "$1; K3_MAX_REQUEUES=${K3_MAX_REQUEUES:-1000} starts are used up, so it is not requeued"
        return
    fi
    # A controller that many ask at once may not answer at the first time.
    for try in 1 2 3 4 5; do
        [ "$try" = 1 ] || sleep "${K3_RETRY_SECONDS:-5}"
        state=$(scontrol show job -o "$(k3_job)" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p')
        [ -n "$state" ] || continue
        if [ "$state" != RUNNING ]; then
            [ -z "$answer" ] || break # the requeue came through, and only its answer did not
            # Slurm requeues or cancels what it has ended itself; a requeue would bring a cancelled job back.
            k3_say "$1; Slurm has ended this start itself (JobState=$state)"
            return
        fi
        [ -n "$answer" ] || k3_say "$1; the job requeues itself"
        trap '' TERM USR1 # the requeue ends this script too, and what follows has to be done before
        answer=$(scontrol requeue "$(k3_job)" 2>&1) && break
        answer=${answer:-no answer} state=
        case $answer in *disabled*) break ;; esac
    done
    if [ -z "$state" ]; then
        k3_say "$1; the job could not be requeued: ${answer:-Slurm does not say how it stands} (is it handed in with --no-requeue?)"
        return
    fi
    if [ -n "${2:-}" ]; then # possible only now that the job is pending
        excluded=$(scontrol show job -o "$(k3_job)" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p')
        [ "$excluded" = "(null)" ] && excluded=
        scontrol update "JobId=$(k3_job)" "ExcNodeList=${excluded:+$excluded,}$2" ||
            k3_say "the nodes $2 could not be excluded; exclude them with scontrol update JobId=$(k3_job) ExcNodeList=$2"
    fi
    exit "${k3_code:-1}"
}

k3_end() { # CODE: the job's last start has ended
    rm -rf "$k3_note_dir"
    exit "$1"
}

# The recipe keys of this task of a job array: its line in K3_SWEEP, and a run of its own. Sets k3_keys.
k3_sweep() {
    [ -n "${K3_SWEEP:-}" ] || return 0
    local line key lines more=() own=0
    [ -f "$K3_SWEEP" ] || k3_fail "K3_SWEEP=$K3_SWEEP does not exist; give a file with one line of recipe keys a task."
    lines=$(grep -c '' "$K3_SWEEP")
    [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || k3_fail "K3_SWEEP is set but this is no job array; add --array=1-$lines to sbatch."
    line=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$K3_SWEEP")
    [ -n "$line" ] || k3_fail "K3_SWEEP=$K3_SWEEP has no line $SLURM_ARRAY_TASK_ID; use --array=1-$lines."
    mapfile -t more < <(xargs printf '%s\n' <<<"$line") # quotes as on a command line
    for key in "${more[@]}"; do case $key in run.name=* | run.dir=*) own=1 ;; esac; done
    if [ "$own" = 0 ]; then
        local i named=0
        for i in "${!k3_keys[@]}"; do
            case ${k3_keys[i]} in run.name=* | run.dir=*) k3_keys[i]+=-$SLURM_ARRAY_TASK_ID named=1 ;; esac
        done
        [ "$named" = 1 ] || more+=("run.name=$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID")
    fi
    k3_keys+=("${more[@]}")
}

# Run Python as the job's steps do: where they are in a container, in a step of one task on NODE (on any where it is empty).
k3_python() { # NODE ARGUMENTS...
    local node=$1
    shift
    if [ -z "${K3_SRUN_OPTIONS:-}" ]; then
        "$K3_PYTHON" "$@"
    else
        timeout --kill-after=10 120 srun "${k3_srun[@]}" --overlap ${node:+"--nodelist=$node"} --nodes=1 --ntasks=1 "$K3_PYTHON" "$@"
    fi
}

# The bad nodes after a check, by what it left in DIR. A node that has written there has a Python that works, and is asked.
k3_verdict() { # DIR
    local nodes node answer tries=3 silent=() good=()
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sort -u)
    for node in $nodes; do if [ -f "$1/$node.json" ]; then good+=("$node"); else silent+=("$node"); fi; done
    [ -n "${K3_SRUN_OPTIONS:-}" ] || tries=1 # the Python here, whatever node is named
    # Each may take k3_python's two minutes, in which no signal is heard.
    for node in ${good[@]+"${good[@]:0:tries}"}; do
        answer=$(k3_python "$node" -m k3train.health --dir "$1" --verdict "$(paste -sd, <<<"$nodes")") || continue
        printf '%s\n' "$answer"
        return 0
    done
    # No Python tells. That no node has written is rather something they share.
    if [ "${#good[@]}" -gt 0 ]; then paste -sd, < <(printf '%s\n' ${silent[@]+"${silent[@]}"}); fi
}

# Check every node. The good ones become the job's, through k3_srun; too few, and the job is requeued without the bad ones.
k3_health() {
    [ "${K3_HEALTH_CHECK:-1}" = 1 ] || return 0
    local dir=$k3_note_dir/health-${SLURM_RESTART_COUNT:-0} options bad good seconds=${K3_HEALTH_SECONDS:-300}
    k3_count K3_HEALTH_SECONDS "$seconds"
    mkdir -p "$dir" || k3_fail "$k3_note_dir cannot be made; set K3_NOTES to a folder that all nodes can write."
    read -ra options <<<"${K3_HEALTH_OPTIONS:-}"
    # The limit for each rank is the check's own; this one is for an srun that cannot start it.
    timeout --kill-after=10 "$((seconds + 60))" srun "${k3_srun[@]}" --ntasks-per-node=1 "--ntasks=$SLURM_NNODES" --wait=30 \
        "$K3_PYTHON" -m k3train.health --dir "$dir" --ranks "$k3_ranks" --nodes "$k3_nodes" --seconds "$seconds" \
        --command "${K3_HEALTH_COMMAND:-}" ${options[@]+"${options[@]}"} -- "${k3_keys[@]}" &
    k3_wait $!
    [ "$k3_stop" = 0 ] || return 0
    # The check says 64 to a recipe that cannot work (srun's own 2 is a Python that is not there); whatever else it was, the
    # nodes' files tell.
    [ "$k3_code" = 64 ] && k3_end 2
    [ "$k3_code" = 0 ] && return 0
    bad=$(k3_verdict "$dir")
    if [ -z "$bad" ]; then
        k3_say "the health check failed (exit code $k3_code) and no node is to blame; see above"
        k3_failed "$k3_code"
    fi
    good=$((SLURM_NNODES - $(tr ',' '\n' <<<"$bad" | grep -c '')))
    local needed=$((k3_nodes + k3_more_nodes))
    if [ "$good" -ge "$needed" ]; then
        k3_say "bad nodes: $bad; training goes on on $k3_nodes of the $good others"
        k3_srun+=("--exclude=$bad")
        return 0
    fi
    k3_requeue "bad nodes: $bad; $good good ones are left and $needed are needed" "$bad"
    k3_end 1
}

# A start that failed: requeue the job unless it fails again and again without getting further.
k3_failed() { # CODE
    local failures=0 before=0 reached=0
    [ -f "$k3_note_dir/failures" ] && read -r failures before <"$k3_note_dir/failures"
    [ -f "$k3_note_dir/checkpoint" ] && reached=$(<"$k3_note_dir/checkpoint") # its step; train/notes.py
    [ "${reached:-0}" -le "${before:-0}" ] || failures=0
    failures=$((failures + 1))
    mkdir -p "$k3_note_dir" && echo "$failures ${reached:-0}" >"$k3_note_dir/failures"
    if [ "$failures" -le "${K3_MAX_FAILURES:-3}" ]; then
        k3_requeue "failed with exit code $1, failure $failures in a row (K3_MAX_FAILURES=${K3_MAX_FAILURES:-3} are forgiven)"
    else
        k3_say "failed with exit code $1, failure $failures in a row; not requeued (K3_MAX_FAILURES=${K3_MAX_FAILURES:-3})"
    fi
    k3_end "$1"
}

# Start the ranks as one job step in the background; its process is $!.
k3_start() {
    local options=("${k3_srun[@]}" "--wait=${K3_EXIT_WAIT:-180}" "--nodes=$k3_nodes")
    if [ "$K3_LAUNCHER" = srun ]; then
        local cpus=$((SLURM_CPUS_ON_NODE / k3_ranks))
        [ "$cpus" -ge 1 ] || [ -n "${K3_CPUS_PER_RANK:-}" ] ||
            k3_fail "$k3_ranks ranks a node, but the job has $SLURM_CPUS_ON_NODE CPUs there; give --ntasks-per-node=$k3_ranks or --exclusive to sbatch."
        srun "${options[@]}" "--ntasks-per-node=$k3_ranks" "--ntasks=$((k3_ranks * k3_nodes))" \
            "--cpus-per-task=${K3_CPUS_PER_RANK:-$cpus}" "$K3_PYTHON" -m k3train "$@" &
    else
        srun "${options[@]}" --ntasks-per-node=1 "--ntasks=$k3_nodes" "--cpus-per-task=$SLURM_CPUS_ON_NODE" \
            bash "$K3_ROOT/slurm/agent.sh" "$K3_PYTHON" "$k3_ranks" "$@" &
    fi
}

# Check the nodes, train, pass stop requests on, and end with the ranks' exit code or requeue this job.
k3_run() { # DEFAULT_RECIPE KEY=VALUE...
    local recipe=$1 note=$k3_note_dir/exit told=
    shift
    k3_keys=("$@")
    case " $* " in *" recipe="*) ;; *) k3_keys=("recipe=$recipe" "$@") ;; esac
    k3_layout
    if declare -F k3_servers_layout >/dev/null; then k3_servers_layout; fi # slurm/server.sh
    k3_sweep
    [ -x "$K3_PYTHON" ] || [ -n "${K3_SRUN_OPTIONS:-}" ] ||
        k3_fail "K3_PYTHON=$K3_PYTHON does not exist; run \`make setup\` in $K3_ROOT, or set K3_PYTHON."
    k3_say "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST with $K3_LAUNCHER: ${k3_keys[*]}"
    k3_health
    mkdir -p "$k3_note_dir" || k3_fail "$k3_note_dir cannot be made; set K3_NOTES to a folder that all nodes can write."
    rm -f "$note"
    export K3TRAIN_EXIT_NOTE=$note K3TRAIN_CHECKPOINT_NOTE=$k3_note_dir/checkpoint K3TRAIN_RANK_LOGS=1
    # A start that ended a moment ago on a node that failed may still hold the run directory's lock.
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then export K3TRAIN_LOCK_WAIT=${K3TRAIN_LOCK_WAIT:-180}; fi
    k3_code=0
    if declare -F k3_before_ranks >/dev/null; then k3_before_ranks; fi # slurm/server.sh
    if [ "$k3_stop" = 0 ]; then
        k3_start "${k3_keys[@]}"
        k3_wait $!
        # torchrun turns every exit code into 1: rank 0's own word counts.
        if [ -f "$note" ]; then told=$(<"$note"); k3_code=$told; fi
        # A rank that has no handler yet dies of the signal.
        case $k3_code in 138 | 143) k3_stop=1 ;; esac
    fi
    if declare -F k3_after_ranks >/dev/null; then k3_after_ranks; fi
    if [ "$k3_code" = 0 ] && { [ "$k3_stop" = 0 ] || [ -n "$told" ]; }; then
        k3_say "finished"
        k3_end 0
    fi
    if [ "$k3_stop" = 1 ]; then
        rm -f "$k3_note_dir/failures"
        k3_requeue "stopped on request (exit code $k3_code)"
    elif [ "$k3_code" != 2 ] && [ "$k3_code" != 130 ]; then
        k3_failed "$k3_code"
    fi
    k3_say "ended with exit code $k3_code"
    k3_end "$k3_code"
}

# Sourced by every .sbatch file: where things are, how the ranks start, what happens on a signal.
#
# Variables, all optional:
#   K3_ROOT            the checkout; the directory sbatch was called in
#   K3_SITE            the site file; $K3_ROOT/slurm/site.sh
#   K3_RECIPE          the recipe, where no recipe=... is given
#   K3_RANKS_PER_NODE  ranks a node; its GPUs, else --ntasks-per-node, else 1
#   K3_LAUNCHER        srun (one task a rank) or torchrun (one agent a node)
#   K3_SWEEP           a file with one line of recipe keys for each task of a job array
#   K3_MAX_REQUEUES    how often a job may requeue itself; 1000
#   K3_HEALTH_CHECK    1: check every node before training (default), 0: do not
#   K3_SRUN_OPTIONS, K3_PYTHON, k3_site_setup: see slurm/site.example.sh
set -uo pipefail

k3_fail() {
    echo "k3train job ${SLURM_JOB_ID:-?}: $*" >&2
    exit 2
}

k3_say() { echo "[$(date +%FT%T)] k3train job $SLURM_JOB_ID: $*"; }

K3_ROOT=${K3_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
[ -f "$K3_ROOT/slurm/environment.sh" ] ||
    k3_fail "K3_ROOT=$K3_ROOT is not a k3train checkout; call sbatch from its root, or set K3_ROOT."
K3_SITE=${K3_SITE:-$K3_ROOT/slurm/site.sh}
# shellcheck source=/dev/null
if [ -f "$K3_SITE" ]; then source "$K3_SITE"; fi
if declare -F k3_site_setup >/dev/null; then k3_site_setup || k3_fail "k3_site_setup of $K3_SITE failed."; fi
K3_PYTHON=${K3_PYTHON:-$K3_ROOT/.venv/bin/python}
[ -x "$K3_PYTHON" ] || k3_fail "K3_PYTHON=$K3_PYTHON does not exist; run \`make setup\` in $K3_ROOT, or set K3_PYTHON."
cd "$K3_ROOT" || k3_fail "K3_ROOT=$K3_ROOT cannot be entered."

# Ranks on one node.
k3_ranks_per_node() {
    local tasks=${SLURM_NTASKS_PER_NODE:-1}
    echo "${K3_RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$tasks}}"
}

# The recipe keys of this task of a job array: its line in K3_SWEEP, and a run of its own.
k3_sweep_keys() {
    [ -n "${K3_SWEEP:-}" ] || return 0
    [ -f "$K3_SWEEP" ] || k3_fail "K3_SWEEP=$K3_SWEEP does not exist; give a file with one line of recipe keys a task."
    [ -n "${SLURM_ARRAY_TASK_ID:-}" ] ||
        k3_fail "K3_SWEEP is set but this is no job array; add --array=1-$(grep -c '' "$K3_SWEEP") to sbatch."
    local line
    line=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$K3_SWEEP")
    [ -n "$line" ] || k3_fail "K3_SWEEP=$K3_SWEEP has no line $SLURM_ARRAY_TASK_ID; use --array=1-$(grep -c '' "$K3_SWEEP")."
    echo "$line"
}

# Start the ranks as one job step in the background; its process is $!.
k3_start() {
    local ranks options
    ranks=$(k3_ranks_per_node)
    read -ra options <<<"${K3_SRUN_OPTIONS:-}"
    # A rank that ends, well or badly, gives the others K3_EXIT_WAIT seconds: to close their files, or to be ended.
    options+=(--kill-on-bad-exit=0 "--wait=${K3_EXIT_WAIT:-120}")
    case ${K3_LAUNCHER:-srun} in
        srun)
            srun ${options[@]+"${options[@]}"} "--ntasks-per-node=$ranks" "--ntasks=$((ranks * SLURM_NNODES))" \
                "$K3_PYTHON" -m k3train "$@" &
            ;;
        torchrun)
            # srun passes signals to torchrun as well, which has no handler for USR1 and would die of it; the workers set
            # their own.
            # shellcheck disable=SC2016
            srun ${options[@]+"${options[@]}"} --ntasks-per-node=1 "--ntasks=$SLURM_NNODES" \
                bash -c 'trap "" USR1; exec "$@" ' _ bash -c '
                    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
                    exec "$1" -m torch.distributed.run --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" \
                        --nproc-per-node="$2" --master-addr="$head" --master-port="$((20000 + SLURM_JOB_ID % 10000))" \
                        -m k3train "${@:3}"' _ "$K3_PYTHON" "$ranks" "$@" &
            ;;
        *) k3_fail "K3_LAUNCHER=$K3_LAUNCHER is not known; set srun or torchrun." ;;
    esac
}

# Start the ranks of a recipe, pass stop requests on to them, and end with their exit code or requeue this job.
k3_run() {
    local recipe=$1 keys=() sweep=() step code stop_asked=0
    shift
    case " $* " in *" recipe="*) ;; *) keys+=("recipe=$recipe") ;; esac
    read -ra sweep <<<"$(k3_sweep_keys)"
    keys+=("$@" ${sweep[@]+"${sweep[@]}"})
    k3_say "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST: ${keys[*]}"
    export K3TRAIN_STOP_NOTE=$K3_ROOT/.k3train-stopped-$SLURM_JOB_ID
    rm -f "$K3TRAIN_STOP_NOTE"
    k3_start "${keys[@]}"
    step=$!
    trap 'stop_asked=1; k3_say "told to stop: the step ends, a checkpoint is written"; kill -USR1 "$step"' USR1 TERM
    # A signal ends `wait` early.
    while :; do
        wait "$step"
        code=$?
        kill -0 "$step" 2>/dev/null || break
    done
    if [ -e "$K3TRAIN_STOP_NOTE" ]; then stop_asked=1; fi
    rm -f "$K3TRAIN_STOP_NOTE"
    if [ "$code" = 0 ]; then k3_say "finished"; exit 0; fi
    if [ "$stop_asked" = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${K3_MAX_REQUEUES:-1000}" ]; then
        k3_say "stopped on request; the job requeues itself and continues from its checkpoint"
        if scontrol requeue "$SLURM_JOB_ID"; then sleep 120; fi
    fi
    k3_say "ended with exit code $code"
    exit "$code"
}

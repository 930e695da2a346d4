# One torchrun agent, started by srun on each node: agent.sh PYTHON RANKS_PER_NODE RECIPE_KEYS...
# Slurm's signals reach every process of the step. The ranks handle them; the agent has no handler for USR1, and on TERM
# or INT would give its ranks 30 s at most, so it ignores them and ends when its ranks have ended.
set -euo pipefail
python=$1 ranks=$2
shift 2
read -r address port < <("$python" -c '
from k3train.environment import address_of, first_host, meeting_port
import os
print(os.environ.get("MASTER_ADDR") or address_of(first_host(os.environ["SLURM_STEP_NODELIST"])), meeting_port())')
trap '' USR1 TERM INT
exec "$python" -m torch.distributed.run --signals-to-handle=SIGQUIT --nnodes="$SLURM_STEP_NUM_NODES" \
    --node-rank="$SLURM_PROCID" --nproc-per-node="$ranks" --master-addr="$address" --master-port="$port" -m k3train "$@"

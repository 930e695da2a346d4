# What is particular to one cluster. Copy to slurm/site.sh (git ignores it) and fill in; every line is optional.

# Read by sbatch itself (its manual, "INPUT ENVIRONMENT VARIABLES"), when a job is handed in with slurm/submit.
# SBATCH_PARTITION=gpu
# SBATCH_ACCOUNT=my-project
# SBATCH_QOS=normal
# SBATCH_GPUS_PER_NODE=8
# SBATCH_EXCLUSIVE=user

# Run on every node before the ranks start: modules, proxies, network settings.
# k3_site_setup() {
#     module load cuda
#     export NCCL_SOCKET_IFNAME=ib0
# }

# The ranks' srun options, such as a container (with pyxis) and its mounts.
# K3_SRUN_OPTIONS="--container-image=/images/k3train.sqsh --container-mounts=$HOME,/scratch"

# The k3train to start; the checkout's .venv where this is not set.
# K3_PYTHON=/opt/k3train/bin/python

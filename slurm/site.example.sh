# What is particular to one cluster. Copy to slurm/site.sh (git ignores it) and fill in; every line is optional.

# Read by sbatch itself (its manual, "INPUT ENVIRONMENT VARIABLES"), when a job is handed in with slurm/submit.
# SBATCH_PARTITION=gpu
# SBATCH_ACCOUNT=my-project
# SBATCH_QOS=normal
# SBATCH_GPUS_PER_NODE=8
# SBATCH_EXCLUSIVE=user

# Run once in the job, before anything starts; the ranks inherit what it exports: modules, proxies, network settings.
# k3_site_setup() {
#     module load cuda
#     export NCCL_SOCKET_IFNAME=ib0
# }

# More options of every srun, such as a container (with pyxis) and its mounts. The checkout has to be mounted under its path.
# K3_SRUN_OPTIONS="--container-image=/images/k3train.sqsh --container-mounts=$HOME,/scratch"

# The Python to start; the checkout's .venv where this is not set.
# K3_PYTHON=/opt/k3train/bin/python

# One more check of each node before training; a node on which it fails is left out.
# K3_HEALTH_COMMAND="dcgmi diag -r 1"

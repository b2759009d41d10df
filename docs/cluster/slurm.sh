#!/usr/bin/env bash
# A Ray on the nodes of one Slurm allocation, and a batch of rollouts on it.
#   sbatch --nodes 4 docs/cluster/slurm.sh tasks/ -m http://model:8000/v1#policy -n 64
#SBATCH --job-name rollcage
#SBATCH --ntasks-per-node 1
#SBATCH --cpus-per-task 32
#SBATCH --exclusive
set -euo pipefail

port=6379
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Boxes and layers belong on a disk of the node's own; the log stays with whoever submitted this.
export ROLLCAGE_HOME="${ROLLCAGE_HOME:-$SLURM_SUBMIT_DIR/rollcage}"
node_home="${TMPDIR:-/tmp}/rollcage-$SLURM_JOB_ID"
export RAY_health_check_period_ms=1000 RAY_health_check_failure_threshold=3

# The head has no places: it is busy with the log. --block keeps each step alive until the job ends.
srun --nodes 1 --ntasks 1 --overlap -w "$first" ray start --head --port "$port" --num-cpus 0 --block &
until ray status --address "$first:$port" >/dev/null 2>&1; do sleep 1; done
srun --nodes "$((SLURM_JOB_NUM_NODES - 1))" --ntasks "$((SLURM_JOB_NUM_NODES - 1))" --overlap --exclude "$first" \
  ray start --address "$first:$port" --num-cpus "$SLURM_CPUS_PER_TASK" --block &

srun --nodes 1 --ntasks 1 --overlap -w "$first" \
  rollcage eval "$@" --ray "$first:$port" --node-home "$node_home"

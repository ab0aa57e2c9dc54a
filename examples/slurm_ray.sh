#!/bin/bash
# A learner on the first node of a Slurm job, and environments on the CPU cores of all nodes, in a Ray cluster:
#   sbatch examples/slurm_ray.sh train experiment=from_scratch task=half_cheetah policy=squashed_gaussian algorithm=sac sim.num_envs=120 sim.num_workers=60 sim.worker_backend=ray
#   sbatch examples/slurm_ray.sh eval runs/lift_seed*/checkpoints/best --jobs 60 --ray --video 0
#SBATCH --job-name=robopolicy-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
set -euo pipefail

trap 'kill $(jobs -p) 2> /dev/null || true' EXIT  # end the nodes of the cluster with the job
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')  # only this job may use its cluster
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
others=$((SLURM_JOB_NUM_NODES - 1))
export RAY_ADDRESS="$first:${RAY_PORT:-6379}"
srun --nodes 1 --ntasks 1 --nodelist "$first" --overlap \
  ray start --head --port "${RAY_ADDRESS##*:}" --num-cpus "$SLURM_CPUS_PER_TASK" --include-dashboard false --block &
until ray status > /dev/null 2>&1; do sleep 1; done
if [ "$others" -gt 0 ]; then
  srun --nodes "$others" --ntasks "$others" --exclude "$first" --overlap \
    ray start --address "$RAY_ADDRESS" --num-cpus "$SLURM_CPUS_PER_TASK" --block &
fi
robopolicy "$@"

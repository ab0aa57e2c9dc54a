#!/bin/bash
# One run on all GPUs of a Slurm job. Arguments are those of `robopolicy train`:
#   sbatch examples/slurm.sh experiment=mjlab_go1_ppo device=cuda name=go1
#   sbatch examples/slurm.sh --resume runs/go1
#SBATCH --job-name=robopolicy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
set -euo pipefail

# Slurm sends SIGTERM two minutes before the time limit: torchrun passes it on, and the run saves its resume point.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$first:${RDZV_PORT:-29500}" \
  --rdzv-id "$SLURM_JOB_ID" \
  -m robopolicy train "$@"

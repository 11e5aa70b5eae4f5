#!/usr/bin/env bash
# GPT-2 124M on two machines with eight GPUs each: sbatch dev/slurm/train.sh [OPTION...], from the
# top of the repository. Submitted again, it goes on from the newest checkpoint. Not tried on Slurm.
#
# srun starts a process for each GPU, and the processes find each other by TCP: rank 0 listens on
# MASTER_PORT of the job's first machine until all have come. That needs no MPI, and no PMIx, which
# which the Slurm of Debian and Ubuntu lacks; the program must have been built with NCCL
# (train_gpt2cu --version shows it). If processes do not find each other, they end with a line that
# says why. Anything that reaches the port in those seconds could take part, so use this only in a
# cluster's own network.

#SBATCH --job-name=train_gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --output=train_gpt2-%j.log
# Two minutes before the time is up every process gets SIGUSR1: all save the same step and end with
# status 0. Larger models take longer to write: give them more than 120 seconds.
#SBATCH --signal=USR1@120

set -eu
# sbatch runs a copy of this script from elsewhere, in the folder where it was called.
[ -x ./train_gpt2cu ] || { echo "$0: no ./train_gpt2cu in $PWD: make train_gpt2cu" >&2; exit 1; }

# The port depends on the job, so that two jobs of one machine do not meet.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT
# All processes of a machine see all of its GPUs, and each takes the one of its own place there;
# --gpus-per-task would show each only one, which keeps some versions of NCCL from connecting them.
# A process that ends ends the others too (-K), which srun leaves to a cluster's settings otherwise.
# Since Slurm 22.05 srun does not inherit --cpus-per-task (sbatch(1)). A later option overrules an
# earlier one.
exec srun --kill-on-bad-exit=1 --gpu-bind=none --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    ./train_gpt2cu -e d12 -z 1 -o runs/slurm -y 1 -n 500 "$@"

#!/usr/bin/env bash
# GPT-2 124M on two machines with eight GPUs each: sbatch dev/slurm/train.sh [OPTION...], from the
# top of the repository. Submitted again, it goes on from the newest checkpoint. Not tried on Slurm.
#
# srun starts a process for each GPU, and the processes find each other by MPI: the program must be
# built where mpicc and NCCL are there (train_gpt2cu --version names both), and srun must start MPI
# programs the way that MPI expects: with pmix for Open MPI; `srun --mpi=list` says what there is.
# Processes that do not find each other end in a line that says so.

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

# All processes of a machine see all of its GPUs, and each takes the one of its own place there.
# A process that ends ends the others too, which srun leaves to a cluster's settings otherwise.
# A later option overrules an earlier one.
exec srun --kill-on-bad-exit=1 --mpi=pmix ./train_gpt2cu -e d12 -z 1 -o runs/slurm -y 1 -n 500 "$@"

#!/usr/bin/env bash
# GPT-2 124M on two machines with eight GPUs each: sbatch dev/slurm/train.sh [OPTION...], from the
# top of the repository. It has run only with emulated GPUs. Submit it again to resume.
#
# srun starts one process per GPU. They connect by TCP: rank 0 listens on MASTER_PORT of the job's
# first machine. This needs neither MPI nor PMIx (which Debian's and Ubuntu's Slurm lacks), only a
# program built with NCCL (see train_gpt2cu --version). If a process cannot connect, the run ends
# with the reason. The connections are not authenticated: use only a cluster's private network.

#SBATCH --job-name=train_gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --output=train_gpt2-%j.log
# Two minutes before the time limit every process gets SIGUSR1: all save the same step and exit with
# status 0. Larger models need more than 120 seconds to save.
#SBATCH --signal=USR1@120

set -eu
# The port depends on the job, so that two jobs on one machine do not conflict.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT
# All processes of a machine see all of its GPUs, and each uses the one with its local rank. With
# --gpus-per-task each would see only one, and some versions of NCCL cannot connect such processes.
# --kill-on-bad-exit ends all processes if one fails. Since Slurm 22.05, srun does not inherit
# --cpus-per-task (sbatch(1)).
launch="srun --kill-on-bad-exit=1 --gpu-bind=none --cpus-per-task=$SLURM_CPUS_PER_TASK" card=h100
options=(-e d12 -z 1 -o runs/slurm -y 1 -n 500)
set -- train "$@"    # options that are given replace these
. dev/recipes/start.sh    # in the folder where sbatch was called, not where Slurm copies this to

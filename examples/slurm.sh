#!/bin/bash
# Trains on two nodes, one process on each, and goes on after it was preempted or its
# time was up: examples/resume.py saves when Slurm sends SIGTERM, and exits with 75.
#
#     sbatch examples/slurm.sh

#SBATCH --job-name=jpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one process, which has all GPUs of its node
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300          # to all processes, 300 s before the end
#SBATCH --requeue                  # after a preemption
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

set -u
cd "$SLURM_SUBMIT_DIR" || exit 1   # the checkout, on a disk that all nodes see

# Compiled programs are kept for the next start of this job.
export JAX_COMPILATION_CACHE_DIR="$PWD/build/jax-cache"
# Seconds for which a process waits for another one: longer than the slowest compiles.
export JPIPE_TIMEOUT=1800

# jpipe.distributed() finds the other processes by the variables that srun sets.
srun --kill-on-bad-exit=1 python examples/resume.py \
    --distributed --folder "$PWD/build/resume" --steps 100000
status=$?

if [ "$status" -eq 75 ]; then      # it was stopped early, and has saved
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

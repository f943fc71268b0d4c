#!/bin/bash
# A run on Slurm: one agent a node. sbatch deploy/slurm.sh --config llama3_8b --workdir /shared/run
#
# Preempted, requeued, out of time or short of a node, the job ends saved and starts again by itself.
#SBATCH --job-name=jaxdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
#SBATCH --output=%x-%j.log

: "${PROCESSES:=1}" # of each node; on GPU nodes the node's GPUs are shared out among them

# The signal goes to this shell alone (B:); srun would answer SIGTERM by killing. An agent hands it on
# to its processes; all save the same step and leave with 75.
stop() {
    told=1
    scancel --signal=TERM "$SLURM_JOB_ID.0" # the step: a job that waits would be cancelled
}
trap stop USR1 TERM

srun --kill-on-bad-exit=1 --ntasks-per-node=1 \
    python -m jaxdist.launch --processes "$PROCESSES" -- python -m jaxdist.train "$@" &
agents=$!
while # a trap ends a wait early, with a code of its own
    told=
    wait "$agents"
    code=$?
    [ -n "$told" ]
do :; done

case $code in
    0 | 1 | 77 | 78) exit "$code" ;; # done, or what a new start would not cure
esac
# 75 preempted, 70 and others: a machine was lost
[ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:=100}" ] || exit "$code"
trap '' USR1 TERM # a requeue ends what still runs of the job, this shell too
scontrol requeue "$SLURM_JOB_ID"

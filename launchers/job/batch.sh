#!/usr/bin/env bash
# Sourced by the batch script before its srun: signals, exit status, and whether the job is put back into the queue.
#
# The time limit's warning (USR1, to this shell only) becomes a file in the run folder: the driver finishes its step,
# saves and exits 75. srun runs in the background here, since bash keeps a signal back until a foreground command ends.
#
# A job goes back into the queue, RESTARTS times at most, if it has made a checkpoint since it started, or if it is the
# first failure at this checkpoint: a node may have been lost. What fails twice in one place would fail there for ever.
# The jobs of one run folder wait for each other (singleton), but a person or another cluster may have a run in it.
#
# Slurm preempts with a grace time: TERM to the tasks only (node.sh notes it), or the warning where a site wishes that.
# A person's scancel sends TERM to this shell too, which ends by it and decides nothing; scancel --signal=TERM reaches
# the tasks alone as well, but then Slurm knows of no preemption.

# nemo-run's wish for unbuffered output gives every task a terminal, on which the driver would draw its live display
unset SLURM_UNBUFFEREDIO

readonly EXIT_STOPPED=75 # of the driver: saved, to be started again
# the configuration is refused; no package, no address, no token (node.sh): before the first checkpoint another start
# would end in the same way, while after it all of this has worked already, and a disk or a node may work again
readonly HOPELESS=' 2 90 91 95 '
readonly NO_CHECKPOINT=none
readonly FAILED_AT_FILE=$LAUNCH_DIR/failed_at
readonly STOP_FILE=$RUN_DIR/stop_requested
readonly LOCK_FILE=$RUN_DIR/.lock EXIT_HELD=100
readonly TOLD_FILE=$LAUNCH_DIR/told.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
readonly GIVEN_UP_FILE=$LAUNCH_DIR/given_up FINISHED_FILE=$LAUNCH_DIR/finished
PREFLIGHT_S=${PREFLIGHT_S:-0}
was_warned=0

say() { echo "[batch, job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}] $*"; }

latest_checkpoint() { cat "$RUN_DIR/checkpoints/latest" 2>/dev/null || echo "$NO_CHECKPOINT"; }

# a driver holds the lock as long as it lives, on any node that shares the locks of the disk; without flock(1) nobody does
run_is_taken() {
  [[ -e $LOCK_FILE ]] || return 1
  flock --nonblock --shared --conflict-exit-code "$EXIT_HELD" "$LOCK_FILE" true 2>/dev/null
  (($? == EXIT_HELD))
}

warn_driver() {
  was_warned=1
  say "the time limit is near, or this job is to make room: asking the driver to save and stop"
  echo "signal from the batch system" > "$STOP_FILE"
}

end_job() { # STATUS REASON: no further job of this submission has anything to do
  say "$2"
  echo "$2" > "$GIVEN_UP_FILE"
  exit "$1"
}

is_preempted() { # in this start of the job; the time of an earlier one may be left
  [[ -e $TOLD_FILE ]] || ((was_warned)) || return 1
  local shown started taken
  shown=$(SLURM_TIME_FORMAT=standard scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null)
  [[ $shown =~ (^| )StartTime=([0-9][^ ]*) ]] && started=${BASH_REMATCH[2]}
  [[ $shown =~ (^| )PreemptTime=([0-9][^ ]*) ]] && taken=${BASH_REMATCH[2]}
  [[ -n ${started:-} && -n ${taken:-} && ! $taken < $started ]]
}

give_up_or_return() { # STATUS CHECKPOINT_BEFORE CHECKPOINT_NOW: of a job that Slurm has not taken the nodes from
  local status=$1 now=$3 place="since the last checkpoint ($3)"
  ((status == EXIT_STOPPED && !was_warned)) && end_job "$status" "not restarted: somebody asked the run to stop"
  if ((status != EXIT_STOPPED)) && run_is_taken; then
    place="while another process had the run folder" # whose checkpoints are not this job's; or a lost node's, for a while
  elif [[ $now != "$2" ]]; then
    return
  fi
  ((status == EXIT_STOPPED)) &&
    end_job "$status" "not restarted: the time limit ends before a step, or a measurement, is done; ask for more with --time"
  [[ $(cat "$FAILED_AT_FILE" 2>/dev/null) == "$place" ]] &&
    end_job "$status" "not restarted: it has failed twice $place, now with status $status"
  echo "$place" > "$FAILED_AT_FILE"
}

decide() { # STATUS CHECKPOINT_BEFORE
  local status=$1 now
  if ((PREFLIGHT_S > 0 && status != 0)); then
    end_job "$status" "the preflight has not passed: $RUN_DIR/preflight/preflight.html, and the log of node 0"
  fi
  now=$(latest_checkpoint)
  if ((status == 0)); then
    say "the run is finished"
    touch "$FINISHED_FILE"
    exit 0
  fi
  [[ $now == "$NO_CHECKPOINT" && $HOPELESS == *" $status "* ]] &&
    end_job "$status" "not restarted: it would end in the same way, see above"
  is_preempted || give_up_or_return "$status" "$2" "$now"
  if ((CHAIN_PLACE < CHAIN)); then
    say "status $status after $now; the next job of the chain goes on"
  elif ((CHAIN > 1)); then
    end_job "$status" "not restarted: it was the last of --chain $CHAIN; the last checkpoint is $now, submit it again to go on"
  elif ((${SLURM_RESTART_COUNT:-0} < RESTARTS)); then
    say "status $status after $now; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
  else
    end_job "$status" "not restarted: --restarts $RESTARTS are used up; the last checkpoint is $now, submit it again to go on"
  fi
  exit "$status"
}

srun() {
  local before status step ended=$LAUNCH_DIR/ended.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
  before=$(latest_checkpoint)
  rm -f "$ended" "$TOLD_FILE"
  command srun "$@" &
  step=$!
  while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal ends a wait, not the step
  wait "$step"
  status=$?
  # srun reports the highest status of all nodes, of which some were killed; the driver's own is the job's
  [[ -s $ended ]] && status=$(< "$ended")
  decide "$status" "$before"
}

if [[ -e $FINISHED_FILE ]]; then
  say "the run is finished already"
  exit 0
fi
if [[ -e $GIVEN_UP_FILE ]]; then
  say "nothing to do: an earlier job of this chain has ended it ($(< "$GIVEN_UP_FILE"))"
  exit 1
fi
# an earlier run's request is over; that of one which is running is not
((PREFLIGHT_S > 0)) || run_is_taken || rm -f "$STOP_FILE"
if ((PREFLIGHT_S > 0)); then trap '' USR1; else trap warn_driver USR1; fi # a preflight has nothing to save
# whoever reaches a Ray without a token can run what they like as its owner
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN
# where a site or a person keeps the environment from jobs (--export), srun would keep the token from the nodes
export SLURM_EXPORT_ENV=ALL

#!/usr/bin/env bash
# One task a node. All nodes start Ray; node 0 starts its head, then the driver, whose exit status is the job's.
#
#   usage: node.sh SETTINGS          (settings.sh, written by the launcher)
#
# Nodes talk through files in LAUNCH_DIR, which all of them see, named by this attempt of the job:
#   head.ATTEMPT    address of the Ray head, once it listens
#   ended.ATTEMPT   exit status of the driver; every other node ends when it appears
#   told.ATTEMPT    a node was told to end (TERM): the batch script must know whether by preemption
# Ray's processes do not end with the job by themselves, and `ray stop` would end those of other jobs on the node too:
# everything started here carries GTPO_LAUNCH in its environment and is ended by that mark.
# shellcheck disable=SC2329 # functions that traps call
set -u

# shellcheck source=/dev/null
source "$1"

readonly EXIT_STOPPED=75 EXIT_NO_PACKAGE=90 EXIT_NO_ADDRESS=91 EXIT_NO_HEAD=92 EXIT_RAY_LOST=93 EXIT_NO_FOLDER=94
readonly EXIT_NO_TOKEN=95
readonly RAY_ATTEMPTS=4
readonly DRIVER_PATIENCE_S=60 # for the driver to say why, when this node's Ray is gone
readonly NODE=$SLURM_NODEID ATTEMPT=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
readonly HEAD_FILE=$LAUNCH_DIR/head.$ATTEMPT ENDED_FILE=$LAUNCH_DIR/ended.$ATTEMPT
readonly TOLD_FILE=$LAUNCH_DIR/told.$ATTEMPT
readonly RAY_LOG=$LOG_DIR/ray-$ATTEMPT-node$NODE.log
readonly MARK=GTPO_LAUNCH=$ATTEMPT
PREFLIGHT_S=${PREFLIGHT_S:-0} # seconds of a preflight, which takes the run's place; 0: the run itself
ray_pid='' driver_pid='' ray_folder='' has_driver=0 is_head=$((NODE == 0))

say() { echo "[node $NODE, $(hostname)] $*"; }

# nobody must ever read half a line
publish() { echo "$2" > "$1.$NODE.tmp" && mv "$1.$NODE.tmp" "$1"; }

fail() {
  say "$2"
  ((is_head)) && publish "$ENDED_FILE" "$1"
  exit "$1"
}

# COMMAND...: takes the place of this subshell, with what --env gives to the job's processes, and the mark
become() {
  # shellcheck disable=SC2163 # its value is NAME=VALUE
  export "${JOB_ENV[@]}" "$MARK"
  exec -- "$@"
}

ours() { grep -lszx -- "$MARK" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }

end_ours() {
  trap '' TERM USR1
  [[ -n $ray_pid ]] && kill -TERM "$ray_pid" 2>/dev/null
  local waited
  for ((waited = 0; waited < 50; waited++)); do
    [[ -z $(ours) ]] && break
    sleep 0.2
  done
  # shellcheck disable=SC2046 # one word a process
  kill -KILL $(ours) 2>/dev/null
  [[ -z $ray_folder ]] || rm -rf -- "$ray_folder"
}

keep_ray_logs() {
  local logs=$ray_folder/ray/session_latest/logs
  [[ -d $logs ]] || return 0
  mkdir -p "$RAY_LOG.d" && cp "$logs"/*.err "$logs"/raylet.out "$logs"/gcs_server.out "$RAY_LOG.d" 2>/dev/null
  find "$RAY_LOG.d" -empty -delete 2>/dev/null
  return 0
}

# `ray start`, which believes that it cannot serve Ray's client: it would on port 10001, for every job on the node
readonly RAY_COMMAND='
import ray.scripts.scripts as scripts
scripts.get_ray_client_dependency_error = lambda: "not wanted"
scripts.main()
'

start_ray() { # arguments: of this kind of node
  (become "$PYTHON" -c "$RAY_COMMAND" start --block --disable-usage-stats --node-ip-address="$address" \
    --num-cpus="$RAY_CPUS" --num-gpus="$GPUS_PER_NODE" --object-store-memory="$OBJECT_STORE_BYTES" \
    --min-worker-port=0 --max-worker-port=0 --temp-dir="$ray_folder/ray" "$@") > "$RAY_LOG" 2>&1 &
  ray_pid=$!
}

ray_is_up() { kill -0 "$ray_pid" 2>/dev/null; }

# Ray gives itself 30 s, which a node that reads its libraries from a busy disk for the first time may exceed
bring_up_ray() { # the same arguments
  local attempt
  for ((attempt = 1; attempt <= RAY_ATTEMPTS; attempt++)); do
    start_ray "$@"
    while ray_is_up; do
      grep -q 'Ray runtime started' "$RAY_LOG" && return 0
      [[ -s $ENDED_FILE ]] && exit 0
      ((SECONDS > START_DEADLINE_S)) && return 1
      sleep 0.2
    done
    say "Ray did not start, attempt $attempt of $RAY_ATTEMPTS: $(tail -n 1 "$RAY_LOG")"
    # shellcheck disable=SC2046 # one word a process
    kill -KILL $(ours) 2>/dev/null
  done
  return 1
}

# a signal to the batch system's step goes to the driver, which saves at the end of its step
tell_driver() { [[ -n $driver_pid ]] && kill -USR1 "$driver_pid" 2>/dev/null; }

# TERM comes to all nodes; only the driver knows when the step is done and saved, and needs every rank until then
end_driver() {
  touch "$TOLD_FILE"
  ((is_head)) || return
  ((has_driver)) || fail "$EXIT_STOPPED" "told to end before the driver was started"
  [[ -n $driver_pid ]] && kill -TERM "$driver_pid" 2>/dev/null # else it has ended, and its own status counts
}

# the package is no copy: what was edited or checked out since the submission is what runs
tell_other_commit() {
  local now
  now=$(become "$PYTHON" -c 'from gtpo_megatron.run_folder.provenance import commit; print(commit())' 2>/dev/null | tail -n 1)
  [[ -z $now || "$now $SUBMIT_COMMIT" == *unknown* || $now == "$SUBMIT_COMMIT" ]] ||
    say "gtpo_megatron is at commit $now now; at the submission it was at $SUBMIT_COMMIT"
}

run_head() {
  tell_other_commit
  bring_up_ray --head --port="$port" --include-dashboard=false --no-monitor ||
    fail "$EXIT_NO_HEAD" "the Ray head did not start within $SECONDS s: $(tail -n 1 "$RAY_LOG"); see $RAY_LOG"
  publish "$HEAD_FILE" "$address:$port"
  say "Ray head at $address:$port"
  local command=("$SUBCOMMAND" "$CONFIG" --run-dir "$RUN_DIR" --resume)
  ((PREFLIGHT_S > 0)) && command=(preflight "$CONFIG" --output "$RUN_DIR/preflight" --seconds "$PREFLIGHT_S" "${PREFLIGHT_SKIP[@]}")
  (become "$PYTHON" -m gtpo_megatron.cli "${command[@]}" \
    --cluster.address "$address:$port" --cluster.num-nodes "$SLURM_NNODES") &
  driver_pid=$! has_driver=1
  while kill -0 "$driver_pid" 2>/dev/null; do wait "$driver_pid"; done # a signal ends a wait, not the driver
  wait "$driver_pid"
  local status=$?
  driver_pid=''
  say "the driver ended with status $status"
  ((status == 0 || status == 75)) || keep_ray_logs
  publish "$ENDED_FILE" "$status"
  exit "$status"
}

run_worker() {
  until [[ -s $HEAD_FILE ]]; do
    [[ -s $ENDED_FILE ]] && exit 0
    ((SECONDS > START_DEADLINE_S)) && fail "$EXIT_NO_HEAD" "no Ray head after $SECONDS s; see the log of node 0"
    sleep 0.2
  done
  bring_up_ray --address="$(< "$HEAD_FILE")" ||
    fail "$EXIT_RAY_LOST" "Ray did not start within $SECONDS s: $(tail -n 1 "$RAY_LOG"); see $RAY_LOG"
  until [[ -s $ENDED_FILE ]]; do
    if ! ray_is_up; then
      keep_ray_logs
      local waited
      for ((waited = 0; waited < DRIVER_PATIENCE_S; waited++)); do
        [[ -s $ENDED_FILE ]] && exit 0
        sleep 1
      done
      fail "$EXIT_RAY_LOST" "Ray has ended on this node: $(tail -n 1 "$RAY_LOG"); see $RAY_LOG"
    fi
    sleep 0.5
  done
  exit 0
}

trap end_ours EXIT
trap tell_driver USR1
trap end_driver TERM
cd "$SUBMIT_DIR" || fail "$EXIT_NO_PACKAGE" "$SUBMIT_DIR is not there on this node; submit from a shared file system"
[[ ${RAY_AUTH_MODE:-} == token && -n ${RAY_AUTH_TOKEN:-} ]] ||
  fail "$EXIT_NO_TOKEN" "the batch script's token for Ray has not come to this node; without one anybody could run what they like"
reason=$(become "$PYTHON" -c 'import gtpo_megatron' 2>&1) ||
  fail "$EXIT_NO_PACKAGE" "$PYTHON ${IMAGE:+of the image $IMAGE }has no gtpo_megatron (${reason##*$'\n'}); ${IMAGE:+build the image from docker/Dockerfile, or }install the package where every node sees it"
export RAY_enable_metrics_collection=0 # nobody reads them, and their port would answer anybody
export RAY_worker_niceness=0           # Ray starts ranks and engines at 15, and whatever else is on the node goes before them
peer=${SLURM_LAUNCH_NODE_IPADDR:-}
# where no other node has to reach it, nothing of the job listens on a network
if ((SLURM_NNODES == 1)) && [[ -z $NETWORK_INTERFACE ]]; then
  peer=127.0.0.1
  export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 # Ray stays on the loopback where it does not make clusters
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=lo}
fi
network=$(become "$PYTHON" "$LAUNCH_DIR/node_network.py" "$NETWORK_INTERFACE" "$peer" "$((is_head ? RAY_PORT : 0))") ||
  fail "$EXIT_NO_ADDRESS" "no address for Ray, see the line above"
# a library that is preloaded, or Python's start, may print lines of its own
[[ $network =~ (^|$'\n')'network '([^ ]+)' '([^ ]*)' '([0-9]+)($|$'\n') ]] ||
  fail "$EXIT_NO_ADDRESS" "node_network.py has told no address: $network"
address=${BASH_REMATCH[2]} interface=${BASH_REMATCH[3]} port=${BASH_REMATCH[4]}
# gloo would take the address that the host name stands for, which may be the loopback's or a management network's
[[ -n $interface ]] && export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
[[ -n $NETWORK_INTERFACE ]] && export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$NETWORK_INTERFACE}
# Ray opens the folder that it is given to everybody, so it gets one inside of ours; not in TMPDIR, whose name may be too
# long for the sockets in it
ray_folder=$(mktemp -d /tmp/gtpo-ray-XXXXXXXX) && [[ -O $ray_folder && $(stat -c %a "$ray_folder") == 700 ]] ||
  fail "$EXIT_NO_FOLDER" "no private folder in /tmp for Ray's sockets and logs; is it full?"
# compiled kernels go to the node's own disk: all ranks of a job would write into one home at once
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$ray_folder/triton} VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$ray_folder/vllm} \
  TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$ray_folder/inductor}
if ((is_head)); then run_head; else run_worker; fi

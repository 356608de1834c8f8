#!/usr/bin/env bash
# A real Slurm on one machine, for tests: a controller and nodes, each with its own address, host name, processes,
# /tmp and /dev/shm (Linux namespaces). No accounting database, no cgroups, no systemd.
#
#   local_slurm.sh start [NODES]     two nodes, node0 and node1, in about a second
#   local_slurm.sh env               prints what a shell needs: source <(local_slurm.sh env)
#   local_slurm.sh pull NODE         kills everything on a node, like pulling its plug
#   local_slurm.sh boot NODE         starts it again
#   local_slurm.sh stop
#
# Needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN (unshare, ip), and: slurmctld slurmd slurm-client munge iproute2.
# LOCAL_SLURM_DIR holds all state. It must not be under /tmp, which every node has its own of, and its path be short:
# sockets are in it. LOCAL_SLURM_NET (10.87.0) and LOCAL_SLURM_BRIDGE (gtpobr0) keep two of these apart. Every node sees
# this checkout, also where it is under /tmp.
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/.." && pwd)
readonly ROOT
readonly STATE=${LOCAL_SLURM_DIR:-/var/tmp/local_slurm} NET=${LOCAL_SLURM_NET:-10.87.0}
readonly BRIDGE=${LOCAL_SLURM_BRIDGE:-gtpobr0}
readonly CPUS_PER_NODE=16 MEMORY_MB=16000 # advertised only: jobs share the machine
readonly CONTROLLER=$NET.254 CONF=$STATE/slurm.conf COMMANDS="slurmctld slurmd munged sbatch ip unshare"
readonly UP_TIMEOUT_S=30

say() { echo "local_slurm: $*" >&2; }
die() { say "$*"; exit 1; }
alive() { [[ -s $1 ]] && kill -0 "$(< "$1")" 2>/dev/null; }
space_of() { echo "$BRIDGE-$1"; }

check() { # why it cannot run here, on stdout; status 1 then
  [[ $(id -u) == 0 ]] || { echo "needs root"; return 1; }
  local command
  for command in $COMMANDS; do
    command -v "$command" > /dev/null || { echo "$command is not installed"; return 1; }
  done
  unshare --net --uts --mount --pid --fork true 2> /dev/null || { echo "namespaces are not allowed here"; return 1; }
  [[ $STATE != /tmp/* ]] || { echo "LOCAL_SLURM_DIR=$STATE is under /tmp"; return 1; }
}

write_conf() { # NUMBER_OF_NODES
  local index
  mkdir -p "$STATE"/{munge,log,state,spool,nodes}
  chmod 755 "$STATE" && chmod 700 "$STATE/munge"
  cat > "$CONF" << CONF
ClusterName=local
SlurmctldHost=$(hostname -s)($CONTROLLER)
SlurmctldPort=16827
SlurmdPort=16828
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$STATE/munge.socket
CredType=cred/munge
StateSaveLocation=$STATE/state
SlurmdSpoolDir=$STATE/spool/%n
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.%n.pid
SlurmctldLogFile=$STATE/log/slurmctld.log
SlurmdLogFile=$STATE/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
MinJobAge=600
KillWait=10
SlurmdTimeout=15
SlurmctldTimeout=30
ReturnToService=2
JobRequeue=1
PropagateResourceLimits=NONE
CONF
  for ((index = 0; index < $1; index++)); do
    echo "NodeName=node$index NodeAddr=$NET.$((index + 1)) CPUs=$CPUS_PER_NODE RealMemory=$MEMORY_MB State=UNKNOWN"
  done >> "$CONF"
  cat >> "$CONF" << CONF
PartitionName=batch Nodes=ALL Default=YES MaxTime=24:00:00 State=UP OverSubscribe=NO
CONF
  echo "CgroupPlugin=cgroup/v1" > "$STATE/cgroup.conf"
  : > "$STATE/plugstack.conf"
  echo "$1" > "$STATE/count"
}

start_munge() {
  (umask 077 && head -c 128 /dev/urandom > "$STATE/munge/key")
  munged --force --key-file="$STATE/munge/key" --socket="$STATE/munge.socket" --pid-file="$STATE/munged.pid" \
    --log-file="$STATE/munge/munged.log" --seed-file="$STATE/munge/seed"
}

boot() { # NODE
  local index=${1#node} home=$STATE/nodes/$1 space other
  alive "$home.pid" && return
  space=$(space_of "$1")
  mkdir -p "$home" "$STATE/spool/$1"
  if ! ip netns add "$space" 2> /dev/null; then :; fi # a node that was pulled keeps its network
  if ! ip -n "$space" link show eth0 > /dev/null 2>&1; then
    ip link add "$BRIDGE-$index" type veth peer name eth0 netns "$space"
    ip link set "$BRIDGE-$index" master "$BRIDGE" up
    ip -n "$space" addr add "$NET.$((index + 1))/24" dev eth0
    ip -n "$space" link set eth0 up
    ip -n "$space" link set lo up
    ip -n "$space" route add default via "$CONTROLLER"
  fi
  {
    echo "127.0.0.1 localhost"
    for ((other = 0; other < $(< "$STATE/count"); other++)); do echo "$NET.$((other + 1)) node$other"; done
    echo "$CONTROLLER $(hostname -s)"
  } > "$home.hosts"
  sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf > "$home.nsswitch"
  cat > "$home.init" << INIT
hostname $1
mount --bind $home.hosts /etc/hosts
mount --bind $home.nsswitch /etc/nsswitch.conf
mount -t tmpfs -o mode=1777 shm /dev/shm
mkdir -p $home.checkout
mount --bind "$ROOT" $home.checkout
mount -t tmpfs -o mode=1777 tmp /tmp
if [[ ! -d "$ROOT" ]]; then mkdir -p "$ROOT" && mount --bind $home.checkout "$ROOT"; fi
export SLURM_CONF=$CONF
trap 'exit 0' TERM
slurmd -D -N $1 &
wait \$!
INIT
  # --kill-child: when this one process dies, every process of the node does
  nohup ip netns exec "$space" unshare --uts --mount --pid --fork --kill-child=SIGKILL --mount-proc \
    bash "$home.init" > "$STATE/log/$1.console" 2>&1 < /dev/null &
  echo $! > "$home.pid"
  disown -a
}

pull() { # NODE
  alive "$STATE/nodes/$1.pid" && kill -KILL "$(< "$STATE/nodes/$1.pid")"
  rm -f "$STATE/nodes/$1.pid"
}

start() { # [NUMBER_OF_NODES]
  local reason count=${1:-2} index deadline
  reason=$(check) || die "$reason"
  [[ -e $STATE/count ]] && stop
  write_conf "$count"
  export SLURM_CONF=$CONF
  start_munge
  ip link show "$BRIDGE" > /dev/null 2>&1 || ip link add "$BRIDGE" type bridge
  ip addr show "$BRIDGE" | grep -q "$CONTROLLER/" || ip addr add "$CONTROLLER/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  slurmctld -c
  for ((index = 0; index < count; index++)); do boot "node$index"; done
  deadline=$((SECONDS + UP_TIMEOUT_S))
  until [[ $(sinfo -h -N -p batch -t idle -o %N 2> /dev/null | wc -l) == "$count" ]]; do
    ((SECONDS < deadline)) || { tail -n 5 "$STATE"/log/* >&2; stop; die "the nodes did not come up"; }
    sleep 0.2
  done
  say "$count nodes after $SECONDS s: source <($0 env)"
}

stop() {
  [[ -e $STATE/count ]] || return 0
  local index count name waited
  count=$(< "$STATE/count")
  for ((index = 0; index < count; index++)); do pull "node$index" || true; done
  for name in slurmctld munged; do
    if alive "$STATE/$name.pid"; then kill "$(< "$STATE/$name.pid")"; fi
  done
  for ((waited = 0; waited < 50; waited++)); do
    alive "$STATE/slurmctld.pid" || break
    sleep 0.1
  done
  for ((index = 0; index < count; index++)); do
    ip netns del "$(space_of "node$index")" 2> /dev/null || true
    ip link del "$BRIDGE-$index" 2> /dev/null || true
  done
  ip link del "$BRIDGE" 2> /dev/null || true
  rm -rf "${STATE:?}"
}

case ${1:-} in
  start) start "${2:-2}" ;;
  stop) stop ;;
  pull) pull "$2" ;;
  boot) boot "$2" ;;
  check) check ;;
  env) echo "export SLURM_CONF=$CONF" ;;
  *) sed -n '2,/^set -e/p' "$0" | grep '^#' && exit 2 ;;
esac

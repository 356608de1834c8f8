# shellcheck shell=bash disable=SC2034
# Written by python -m launchers.slurm; read by batch.sh and node.sh.
RUN_DIR=/RUN
LAUNCH_DIR=/RUN/launch/dry-run
LOG_DIR=/RUN/logs
SUBCOMMAND=sft
CONFIG=/RUN/launch/dry-run/config.yaml
SUBMIT_DIR=/SUBMIT
SUBMIT_COMMIT=HASH
PYTHON=/ENV/bin/python
IMAGE=''
GPUS_PER_NODE=0
RAY_CPUS=2
OBJECT_STORE_BYTES=134217728
RAY_PORT=0
NETWORK_INTERFACE=''
START_DEADLINE_S=180
RESTARTS=20
CHAIN=1
PREFLIGHT_S=0
PREFLIGHT_SKIP=()
JOB_ENV=()

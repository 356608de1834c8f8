# shellcheck shell=bash disable=SC2034
# Written by python -m launchers.slurm; read by batch.sh and node.sh.
RUN_DIR=/RUN
LAUNCH_DIR=/RUN/launch/dry-run
LOG_DIR=/RUN/logs
SUBCOMMAND=train
CONFIG=/RUN/launch/dry-run/config.yaml
SUBMIT_DIR=/SUBMIT
SUBMIT_COMMIT=HASH
PYTHON=/ENV/bin/python
IMAGE=''
GPUS_PER_NODE=8
RAY_CPUS=2
OBJECT_STORE_BYTES=17179869184
RAY_PORT=0
NETWORK_INTERFACE=''
START_DEADLINE_S=1800
RESTARTS=20
CHAIN=1
PREFLIGHT_S=0
PREFLIGHT_SKIP=()
JOB_ENV=()

#!/usr/bin/env bash
# Installs what tools/local_slurm.sh needs, where that is possible: Debian or Ubuntu, as root. Idempotent. Elsewhere it
# says so and succeeds: the tests that need Slurm are then skipped with the reason.
set -euo pipefail

readonly PACKAGES=(slurmctld slurmd slurm-client munge iproute2)

for command in slurmctld slurmd sbatch munged ip; do
  command -v "$command" > /dev/null || missing=1
done
[[ -n ${missing:-} ]] || exit 0
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
  echo "install_slurm: needs root and apt-get; install ${PACKAGES[*]} by hand" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}"; } > /dev/null; then
  echo "install_slurm: ${PACKAGES[*]} cannot be installed here" >&2
fi

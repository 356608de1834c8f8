#!/usr/bin/env bash
# Installs bubblewrap, which runs the programs of code rewards, where that is possible: Debian or Ubuntu, as root.
# Idempotent. Elsewhere it says so and succeeds: the tests that need it are then skipped with the reason.
set -euo pipefail

command -v bwrap > /dev/null && exit 0
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
  echo "install_bubblewrap: needs root and apt-get; install bubblewrap by hand" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; } > /dev/null; then
  echo "install_bubblewrap: bubblewrap cannot be installed here" >&2
fi

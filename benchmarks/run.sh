#!/bin/sh
# The figures that README.md and docs/performance.md quote, in one run: medians, taken in turns.
#
#   benchmarks/run.sh [--rounds N] [--mib N] [--json FILE]
#
# Environment: PYTHON, a Python that has weightwire (make bench sets it); PEERS_KIT, the folder of the peer benchmark
# kit (raw sockets, httpx and others), by default the one beside the project; PEERS_DIR, where the kit's environments
# are or are to be made.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PEERS_KIT=${PEERS_KIT:-../shared/peers}
PEERS_DIR=${PEERS_DIR:-.cache/peers}

"$PYTHON" benchmarks/transfer.py "$@"

if [ ! -f "$PEERS_KIT/bench_transfer.py" ]; then
  echo "skipped: comparison with raw sockets and httpx, since there is no peer benchmark kit at $PEERS_KIT"
  exit 0
fi
if [ ! -e "$PEERS_DIR/base/.ready" ]; then
  # Of the kit's peers only raw sockets and httpx are asked for, so that a peer that does not install is no failure.
  sh -c "bash \"$PEERS_KIT/setup.sh\" \"$PEERS_DIR\"" || [ -e "$PEERS_DIR/base/.ready" ]
fi
case $PYTHON in */*) command=$(cd "$(dirname "$PYTHON")" && pwd)/weightwire ;; *) command=weightwire ;; esac
"$PYTHON" "$PEERS_KIT/bench_transfer.py" --peers-dir "$PEERS_DIR" --only raw,httpx,memcpy --rounds 9 --wait-idle 90 \
  --ours "$command bench pull --mib {mib} --streams {streams} --json"

#!/usr/bin/env bash
# Hosts that come and go. The same command on every host, at any time; as many train as are there.
#
#     MASTER_ADDR=10.0.0.1 HOSTS=1:3 SNAPSHOTS=/shared/run-1 examples/launch/elastic.sh --epochs 90
#
# MASTER_ADDR is a host that stays: it has the rendezvous. SNAPSHOTS is on storage that all hosts see.
set -euo pipefail
cd "$(dirname "$0")/../.."

# torch 2.13 lets agents and ranks share a store, and a host that joins later never gets in (pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
  --nnodes="${HOSTS:-1:3}" --nproc-per-node="${RANKS:-1}" --max-restarts="${RESTARTS:-100}" \
  --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29400}" --rdzv-id="${RUN:-cannikin}" \
  --rdzv-conf=last_call_timeout=5 \
  examples/launch/train.py --snapshots "$SNAPSHOTS" "$@"

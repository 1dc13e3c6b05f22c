#!/usr/bin/env bash
# The same command on every host. Rank 0's host is MASTER_ADDR; each host says which one it is.
#
#     MASTER_ADDR=10.0.0.1 NUM_HOSTS=3 HOST=0 examples/launch/several_hosts.sh      # on the first host
#     MASTER_ADDR=10.0.0.1 NUM_HOSTS=3 HOST=1 examples/launch/several_hosts.sh      # on the second, and so on
#
# Hosts may have different numbers of GPUs: RANKS is this host's own.
set -euo pipefail
cd "$(dirname "$0")/../.."

torchrun \
  --nnodes="$NUM_HOSTS" --node-rank="$HOST" \
  --nproc-per-node="${RANKS:-1}" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" \
  examples/launch/train.py "$@"

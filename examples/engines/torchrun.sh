#!/bin/sh
# Train an experiment on two nodes. On each of them, with the address of the first one:
#
#   MASTER_ADDR=10.0.0.1 examples/engines/torchrun.sh 0 examples/engines/digits.yaml runs/two-nodes
#   MASTER_ADDR=10.0.0.1 examples/engines/torchrun.sh 1 examples/engines/digits.yaml runs/two-nodes
#
# The folder of the record has to be on storage that both share. On one machine, as root, in two
# network namespaces (RANK is the number of the node):
#
#   orchestra emulation run examples/engines/two_nodes.yaml -- \
#       sh -c 'exec examples/engines/torchrun.sh "$RANK" examples/engines/digits.yaml runs/two-nodes'
#
# When a node is lost, the other one goes on alone from the newest checkpoint, if it is the one that
# holds the rendezvous, MASTER_ADDR.
set -eu
node=$1 experiment=$2 record=$3

exec torchrun --nnodes 1:2 --nproc-per-node "${RANKS_PER_NODE:-1}" --max-restarts 3 \
    --rdzv-id digits --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:29400" \
    --rdzv-conf "is_host=$([ "$node" = 0 ] && echo true || echo false),last_call_timeout=5" \
    --local-addr "${LOCAL_ADDR:-$(hostname -I | cut -d' ' -f1)}" \
    -m orchestra train "$experiment" --out "$record"

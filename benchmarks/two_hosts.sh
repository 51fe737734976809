#!/usr/bin/env bash
# Trains under `torchrun --nnodes=2` on two hosts that are network namespaces of this machine, joined by one cable.
# Needs root and iproute2.   usage: benchmarks/two_hosts.sh [RUN.yaml [motet's arguments]]
set -euo pipefail
cd "$(dirname "$0")/.."
run_file=${1:-examples/tiny.yaml}
shift || true
bin=$(dirname "$(command -v torchrun)")
ranks=4

for host in 0 1; do
    ip netns add "motet$host"
done
trap 'for host in 0 1; do ip netns del "motet$host"; done' EXIT
ip link add cable0 netns motet0 type veth peer name cable1 netns motet1
for host in 0 1; do
    ip -n "motet$host" address add "10.77.0.$((host + 1))/24" dev "cable$host"
    ip -n "motet$host" link set "cable$host" up
    ip -n "motet$host" link set lo up
done

pids=()
for host in 0 1; do
    ip netns exec "motet$host" env GLOO_SOCKET_IFNAME="cable$host" OMP_NUM_THREADS=1 "$bin/torchrun" \
        --nnodes=2 --nproc-per-node=$((ranks / 2)) --local-addr="10.77.0.$((host + 1))" \
        --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29500 --rdzv-conf=is_host=$((1 - host)) \
        --rdzv-id=two-hosts --max-restarts=0 --no-python \
        "$bin/motet" train "$run_file" --set cluster.num_devices=$ranks --set cluster.num_nodes=2 "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"

#!/bin/bash
# The node of one host of a Slurm job: started by job.sbatch.
set -euo pipefail
: "${DATAPLANE_KEY:?}" "${DATAPLANE_SEEDS:?}" "${DATAPLANE_SOCKET:?}"

mkdir -p "$(dirname "$DATAPLANE_SOCKET")"
chmod 700 "$(dirname "$DATAPLANE_SOCKET")"
exec dataplane node \
    --socket "$DATAPLANE_SOCKET" \
    --listen "tcp://${SLURMD_NODENAME:-$(hostname)}:7071" \
    --seeds "$DATAPLANE_SEEDS" \
    --key "$DATAPLANE_KEY" \
    --memory "${DATAPLANE_MEMORY:-64GiB}" \
    --spill-dir "${SLURM_TMPDIR:-/var/tmp}" \
    --metrics "0.0.0.0:${DATAPLANE_METRICS_PORT:-9464}"

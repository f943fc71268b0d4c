#!/bin/bash
# A run on the hosts of a Cloud TPU slice, started on all of them from any machine with gcloud:
#
#     deploy/tpu_vm.sh NAME ZONE --config llama3_8b --workdir runs/one \
#         --config.checkpoint.folder=gs://bucket/run
#
# Checkpoints must lie where all hosts see them. The workdir may be each host's own; the first has the logs.
# One agent and one process a host. A lost process ends the run on all hosts (exit code 70), and each
# host starts again, as does one whose agent was killed (137); 0, 1, 75, 77 and 78 end it.
set -euo pipefail
name=$1 zone=$2
shift 2
arguments=$(printf '%q ' "$@")

gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "
    value() { curl -sf -H 'Metadata-Flavor: Google' http://metadata.google.internal/computeMetadata/v1/instance/attributes/\$1; }
    hosts=\$(value worker-network-endpoints | tr , '\n' | cut -d: -f3) # ID:PORT:ADDRESS, with commas
    export JAXDIST_AGENT=\$(value agent-worker-number) JAXDIST_AGENTS=\$(echo \"\$hosts\" | wc -l)
    export JAXDIST_AGENTS_AT=\$(echo \"\$hosts\" | head -1):61440
    for _ in \$(seq 100); do
        python3 -m jaxdist.launch -- python3 -m jaxdist.train $arguments
        code=\$?
        case \$code in 0 | 1 | 75 | 77 | 78) break ;; esac
        sleep 5
    done
    exit \$code"

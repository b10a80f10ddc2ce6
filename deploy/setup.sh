#!/bin/sh
# Registers with the server at PREFECT_API_URL what runs need: work pool, automation, deployments. Type it in the
# project's folder, again after a change of prefect.yaml; `dapo up` does the same.
set -eu
prefect server status --wait --timeout 180
prefect work-pool inspect dapo > /dev/null 2>&1 || prefect work-pool create dapo --type process
prefect automation inspect 'dapo: crashed without a heartbeat' > /dev/null 2>&1 ||
    prefect automation create --from-file flows/crashed_runs.yaml
prefect --no-prompt deploy --all

#!/bin/sh
# Registers work pool, automation and deployments with the server at PREFECT_API_URL. Run it in the project folder,
# and again after changing prefect.yaml; `dapo up` does the same.
set -eu
prefect server status --wait --timeout 180
pool=$(sed -n '/^  work_pool:/,/name:/s/.*name: *//p' prefect.yaml)
prefect work-pool inspect "$pool" > /dev/null 2>&1 || prefect work-pool create "$pool" --type process
prefect automation inspect 'dapo: crashed without a heartbeat' > /dev/null 2>&1 ||
    prefect automation create --from-file flows/crashed_runs.yaml
prefect --no-prompt deploy --all

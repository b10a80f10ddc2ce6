#!/usr/bin/env bash
# Ray on node2, which joins node1: 16 NPU.
#     bash node2.sh start   # waits for the head
#     bash node2.sh stop    # stops this Ray, and nothing else
# Rendered from tests/data/rendered/inventory.yaml by `dapo cluster render`: edit that and render again.
set -euo pipefail

NODE=node2
HEAD=node1
PORT=6379
RAY_HEAD=$HEAD:$PORT
cd "$HOME"/dapo-pipeline
PYTHON=.venv/bin/python
STATE=${DAPO_STATE:-$HOME/.dapo/scripts}/$NODE-$PORT

die() {
  echo "$NODE: $*" >&2
  exit 1
}

# Set INTERFACE and ADDRESS: interface $1, or if it is empty the one that leads to a host in $3...; $2 is this host.
find_interface() {
  read -r INTERFACE ADDRESS < <("$PYTHON" -c '
import sys
from dapo_core.errors import DapoError
from tasks.nodes.interface import interface_towards
try:
    found = interface_towards(sys.argv[3:], sys.argv[1] or None, sys.argv[2])
except DapoError as error:
    sys.exit(str(error))
print(found.name, found.address)' "$@") || die "no interface for Ray (above)"
}

require_token() { # the same on every node; anyone who has it can run code as this user
  export RAY_AUTH_MODE=token
  [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -s "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ] ||
    die "no token: ray get-auth-token --generate, then copy ~/.ray/auth_token to every node (docs/security.md)"
}

raise_limits() { # open files, for Ray and the engines together
  ulimit -Sn 32768 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
}

wait_for_head() { # until its port answers, at most $1 seconds
  local end=$((SECONDS + $1))
  until timeout 3 bash -c "exec 3<>/dev/tcp/$HEAD/$PORT" 2>/dev/null; do
    [ "$SECONDS" -lt "$end" ] || die "port $PORT of $HEAD did not answer within $1 s: is Ray running there, is the port open?"
    sleep 1
  done
}

start_time() { # of a process, in ticks since boot; empty if it has ended
  sed -n 's/.*) [^Z] //p' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 19
}

was_started() { # by this script, and not stopped since; sets PID, STARTED and FOLDER
  [ -s "$STATE/process" ] && read -r PID STARTED FOLDER <"$STATE/process"
}

is_running() { # pids are reused, pids with their start time are not
  was_started && [ "$(start_time "$PID")" = "$STARTED" ]
}

# Print the pids of all processes of this Ray. They have FOLDER in their environment; those that overwrite it with a
# title are in the session of the first process, with a log open in FOLDER.
living() {
  local pid
  grep -slzFx "DAPO_RAY=$FOLDER" /proc/[0-9]*/environ | cut -d / -f 3
  { sed -sn "s/^\([0-9]*\) (.*) [^Z] [0-9]* [0-9]* $PID .*/\1/p" /proc/[0-9]*/stat 2>/dev/null || true; } |
    while read -r pid; do
      [ -z "$(find "/proc/$pid/fd" -lname "$FOLDER/*" -print -quit 2>/dev/null)" ] || echo "$pid"
    done
}

start() {
  require_token
  find_interface bond1 192.0.2.12 node1
  if is_running; then
    echo "$NODE: Ray is already running, pid $PID"
  else
    if was_started; then
      echo "$NODE: the Ray of the last start, pid $PID, has died; stopping its remaining processes"
      stop
    fi
    raise_limits
    export GLOO_SOCKET_IFNAME="$INTERFACE"
    export TP_SOCKET_IFNAME="$INTERFACE"
    export HCCL_SOCKET_IFNAME="=$INTERFACE"
    export VLLM_HOST_IP="$ADDRESS"
    export VLLM_ASCEND_ENABLE_NZ=0
    export TASK_QUEUE_ENABLE=1
    export HCCL_CONNECT_TIMEOUT=1800
    export HCCL_BUFFSIZE=400
    wait_for_head 120
    mkdir -p "$STATE"
    FOLDER=$(mktemp -d /tmp/dapo-ray-XXXXXX) # for Ray's sockets, whose paths must be short, and logs
    DAPO_RAY=$FOLDER setsid "$PYTHON" -m ray.scripts.scripts start --address="$RAY_HEAD" \
      --node-ip-address="$ADDRESS" '--resources={"NPU": 16}' --num-cpus=192 \
      --temp-dir="$FOLDER" --disable-usage-stats --block >"$STATE/log" 2>&1 </dev/null &
    PID=$!
    STARTED=$(start_time "$PID") || true
    echo "$PID ${STARTED:-0} $FOLDER" >"$STATE/process" # 0: it has already ended
    echo "$NODE: starting Ray at $ADDRESS ($INTERFACE), pid $PID, log $STATE/log"
  fi
  wait_until_started 120
}

wait_until_started() { # at most $1 seconds
  local end=$((SECONDS + $1))
  until grep -q "Ray runtime started" "$STATE/log"; do
    is_running || die "Ray has ended: $(tail -n 3 "$STATE/log" | tr '\n' ' ')(log $STATE/log)"
    [ "$SECONDS" -lt "$end" ] || die "Ray did not start within $1 s (log $STATE/log)"
    sleep 1
  done
}

stop() {
  local left
  if ! was_started; then
    echo "$NODE: this script has no Ray running"
    return
  fi
  if is_running; then
    kill -TERM "$PID" # it ends the others
    for _ in $(seq 30); do
      [ -n "$(living)" ] || break
      sleep 0.5
    done
  fi
  for _ in $(seq 20); do
    left=$(living)
    [ -n "$left" ] || break
    # shellcheck disable=SC2086 # pids
    kill -KILL $left 2>/dev/null || true
    sleep 0.5
  done
  [ -z "$left" ] || die "SIGKILL did not end pid ${left//$'\n'/, }"
  rm -rf -- "$FOLDER" "$STATE/process"
  echo "$NODE: Ray has ended"
}

case "${1:-}" in
  start) start ;;
  stop) stop ;;
  *) die "usage: $0 start|stop" ;;
esac

#!/usr/bin/env bash
# Ray on {{ host.name }}, {{ "the head" if is_head else "which joins " ~ head.name }}: {{ devices }} {{ resource }}.
#     bash {{ host.name }}.sh start   # {{ "waits until all have joined: " ~ names | join(", ") if is_head else "waits for the head" }}
#     bash {{ host.name }}.sh stop    # stops this Ray, and nothing else
# Rendered from {{ source }} by `dapo cluster render`: edit that and render again.
set -euo pipefail

NODE={{ host.name }}
HEAD={{ head.reached_at }}
PORT={{ port }}
RAY_HEAD={{ "[" ~ head.reached_at ~ "]" if ":" in head.reached_at else "$HEAD" }}:$PORT
cd {{ project | quote_path }}
{% if setup %}
if [ "${1:-}" = start ]; then
set +eu # setup files may read unset variables
{
{{ setup }}
} || {
  echo "$NODE: the inventory's setup failed" >&2
  exit 1
}
set -eu
fi
{% endif %}
PYTHON={{ python | quote_path }}
STATE=${DAPO_STATE:-$HOME/.dapo/scripts}/$NODE-$PORT

{% include "functions.sh" %}

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
  find_interface {{ (host.interface or "") | quote }} {{ host.reached_at }} {{ peers | join(" ") }}
{% if num_nodes == 1 %}
  RAY_HEAD=${ADDRESS/*:*/[$ADDRESS]}:$PORT # the name may resolve to loopback, such as 127.0.1.1
{% endif %}
  if is_running; then
    echo "$NODE: Ray is already running, pid $PID"
  else
    if was_started; then
      echo "$NODE: the Ray of the last start, pid $PID, has died; stopping its remaining processes"
      stop
    fi
    raise_limits
{% for name, value in environment.items() %}
    export {{ name }}={{ value }}
{% endfor %}
{% if not is_head %}
    wait_for_head {{ seconds }}
{% endif %}
    mkdir -p "$STATE"
    FOLDER=$(mktemp -d /tmp/dapo-ray-XXXXXX) # for Ray's sockets, whose paths must be short, and logs
    DAPO_RAY=$FOLDER setsid "$PYTHON" -m ray.scripts.scripts start {{ head_options if is_head else "--address=\"$RAY_HEAD\"" }} \
      --node-ip-address="$ADDRESS" {{ options }} \
      --temp-dir="$FOLDER" --disable-usage-stats --block >"$STATE/log" 2>&1 </dev/null &
    PID=$!
    STARTED=$(start_time "$PID") || true
    echo "$PID ${STARTED:-0} $FOLDER" >"$STATE/process" # 0: it has already ended
    echo "$NODE: starting Ray at $ADDRESS ($INTERFACE), pid $PID, log $STATE/log"
  fi
  wait_until_started {{ seconds }}
{% if is_head %}
  "$PYTHON" -m tasks.nodes.joined "$RAY_HEAD" --seconds {{ seconds }} --resource {{ resource }} --count {{ num_devices }} \
    {{ hosts | join(" ") }}
  echo "train with: RAY_AUTH_MODE=token dapo run CONFIG --set train.ray_address=$RAY_HEAD"
{% endif %}
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

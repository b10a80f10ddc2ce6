#!/usr/bin/env bash
# Ray on {{ host.name }}, {{ "the head" if is_head else "which joins " ~ head.name }}: {{ devices }} {{ resource }}.
#     bash {{ host.name }}.sh start   # {{ "waits until all have joined: " ~ names | join(", ") if is_head else "waits for the head" }}
#     bash {{ host.name }}.sh stop    # ends what start began, and nothing else
# Rendered from {{ source }} by `dapo cluster render`: change that, and render again.
set -euo pipefail

NODE={{ host.name }}
HEAD={{ head.reached_at }}
PORT={{ port }}
RAY_HEAD={{ "[" ~ head.reached_at ~ "]" if ":" in head.reached_at else "$HEAD" }}:$PORT
cd {{ project | quote_path }}
{% if setup %}
if [ "${1:-}" = start ]; then
set +eu # such files read variables that are not set
{
{{ setup }}
} || {
  echo "$NODE: the inventory's setup has failed" >&2
  exit 1
}
set -eu
fi
{% endif %}
PYTHON={{ python | quote_path }}
STATE=${DAPO_STATE:-$HOME/.dapo/scripts}/$NODE-$PORT

{% include "functions.sh" %}

began_at() { # when a process began, in ticks since the machine did; nothing for one that has ended
  sed -n 's/.*) [^Z] //p' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 19
}

was_started() { # by this script and not stopped since; sets PID, BEGAN and FOLDER
  [ -s "$STATE/process" ] && read -r PID BEGAN FOLDER <"$STATE/process"
}

is_running() { # a pid is used again, a pid with its start time is not
  was_started && [ "$(began_at "$PID")" = "$BEGAN" ]
}

# Pids of all that the start began, its first process or not. Each has FOLDER in its environment; those that write a
# title over it are in the session of the start, with a log open in FOLDER.
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
  RAY_HEAD=${ADDRESS/*:*/[$ADDRESS]}:$PORT # the name may lead to loopback, such as 127.0.1.1
{% endif %}
  if is_running; then
    echo "$NODE: Ray runs, pid $PID"
  else
    if was_started; then
      echo "$NODE: Ray of the last start, pid $PID, has died; what it left is ended first"
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
    FOLDER=$(mktemp -d /tmp/dapo-ray-XXXXXX) # of Ray's sockets and logs; their paths must be short
    DAPO_RAY=$FOLDER setsid "$PYTHON" -m ray.scripts.scripts start {{ head_options if is_head else "--address=\"$RAY_HEAD\"" }} \
      --node-ip-address="$ADDRESS" {{ options }} \
      --temp-dir="$FOLDER" --disable-usage-stats --block >"$STATE/log" 2>&1 </dev/null &
    PID=$!
    BEGAN=$(began_at "$PID") || true
    echo "$PID ${BEGAN:-0} $FOLDER" >"$STATE/process" # 0: it has ended already
    echo "$NODE: Ray starts at $ADDRESS ($INTERFACE), pid $PID, log $STATE/log"
  fi
  wait_until_started {{ seconds }}
{% if is_head %}
  "$PYTHON" -m tasks.nodes.joined "$RAY_HEAD" --seconds {{ seconds }} --resource {{ resource }} --count {{ num_devices }} \
    {{ hosts | join(" ") }}
  echo "train with: RAY_AUTH_MODE=token dapo run CONFIG --set train.ray_address=$RAY_HEAD"
{% endif %}
}

wait_until_started() { # for $1 seconds at most
  local end=$((SECONDS + $1))
  until grep -q "Ray runtime started" "$STATE/log"; do
    is_running || die "Ray has ended: $(tail -n 3 "$STATE/log" | tr '\n' ' ')(log $STATE/log)"
    [ "$SECONDS" -lt "$end" ] || die "Ray has not started within $1 s (log $STATE/log)"
    sleep 1
  done
}

stop() {
  local left
  if ! was_started; then
    echo "$NODE: no Ray of this script runs"
    return
  fi
  if is_running; then
    kill -TERM "$PID" # and it ends the others
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
  [ -z "$left" ] || die "SIGKILL does not end pid ${left//$'\n'/, }"
  rm -rf -- "$FOLDER" "$STATE/process"
  echo "$NODE: Ray has ended"
}

case "${1:-}" in
  start) start ;;
  stop) stop ;;
  *) die "say start or stop" ;;
esac

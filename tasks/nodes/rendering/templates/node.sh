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
  sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20
}

is_running() { # sets PID and FOLDER; a pid is used again, a pid with its start time is not
  local began
  [ -s "$STATE/process" ] && read -r PID began FOLDER <"$STATE/process" && [ "$(began_at "$PID")" = "$began" ]
}

start() {
  require_token
  if is_running; then
    echo "$NODE: Ray runs, pid $PID"
  else
    raise_limits
    find_interface {{ (host.interface or "") | quote }} {{ host.reached_at }} {{ peers | join(" ") }}
{% for name, value in environment.items() %}
    export {{ name }}={{ value }}
{% endfor %}
{% if not is_head %}
    wait_for_head {{ seconds }}
{% endif %}
    mkdir -p "$STATE"
    FOLDER=$(mktemp -d /tmp/dapo-ray-XXXXXX) # of Ray's sockets and logs; their paths must be short
    setsid "$PYTHON" -m ray.scripts.scripts start {{ head_options if is_head else "--address=\"$RAY_HEAD\"" }} \
      --node-ip-address="$ADDRESS" {{ options }} \
      --temp-dir="$FOLDER" --disable-usage-stats --block >"$STATE/log" 2>&1 </dev/null &
    PID=$!
    echo "$PID $(began_at "$PID") $FOLDER" >"$STATE/process"
    echo "$NODE: Ray starts at $ADDRESS ($INTERFACE), pid $PID, log $STATE/log"
  fi
  wait_until_started {{ seconds }}
{% if is_head %}
  "$PYTHON" -m tasks.nodes.joined "$RAY_HEAD" --seconds {{ seconds }} --resource {{ resource }} --count {{ num_devices }} \
    {{ hosts | join(" ") }}
  echo "train with RAY_AUTH_MODE=token dapo run CONFIG --set train.ray_address=$RAY_HEAD"
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
  if ! is_running; then
    echo "$NODE: no Ray of this script runs"
    return
  fi
  kill -TERM "$PID"
  for _ in $(seq 30); do
    kill -0 -- "-$PID" 2>/dev/null || break
    sleep 0.5
  done
  kill -KILL -- "-$PID" 2>/dev/null || true # the process group that start made
  rm -rf -- "$FOLDER" "$STATE/process"
  echo "$NODE: Ray has ended"
}

case "${1:-}" in
  start) start ;;
  stop) stop ;;
  *) die "say start or stop" ;;
esac

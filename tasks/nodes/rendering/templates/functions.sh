die() {
  echo "$NODE: $*" >&2
  exit 1
}

# Sets INTERFACE and ADDRESS: interface $1, or if that is empty the one that leads to a host of $3 and on; $2: this host.
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

require_token() { # the same on every node; whoever has it may run code as this user
  export RAY_AUTH_MODE=token
  [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -s "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ] ||
    die "no token: ray get-auth-token --generate, then copy ~/.ray/auth_token to every node (docs/security.md)"
}

raise_limits() { # open files, of Ray and the engines together
  ulimit -Sn {{ open_files }} 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
}

wait_for_head() { # until its port answers, for $1 seconds at most
  local end=$((SECONDS + $1))
  until timeout 3 bash -c "exec 3<>/dev/tcp/$HEAD/$PORT" 2>/dev/null; do
    [ "$SECONDS" -lt "$end" ] || die "port $PORT of $HEAD does not answer within $1 s: is Ray started there, is the port open?"
    sleep 1
  done
}

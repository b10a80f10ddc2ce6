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
  ulimit -Sn {{ open_files }} 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
}

wait_for_head() { # until its port answers, at most $1 seconds
  local end=$((SECONDS + $1))
  until timeout 3 bash -c "exec 3<>/dev/tcp/$HEAD/$PORT" 2>/dev/null; do
    [ "$SECONDS" -lt "$end" ] || die "port $PORT of $HEAD did not answer within $1 s: is Ray running there, is the port open?"
    sleep 1
  done
}

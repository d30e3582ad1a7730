#!/usr/bin/env bash
# scripts/postgres.sh COMMAND…: run a command beside a private PostgreSQL, whose URL is in AUTOTUNE_TEST_POSTGRES.
# A cluster of its own in a temporary folder, reached through a socket there and no network; removed afterwards.
# PostgreSQL refuses root, so root runs it as the user that Debian's package made. Without PostgreSQL the command
# runs alone, and the tests say what they skipped.
set -euo pipefail

find_bin() { # folder of initdb: on the path, or Debian's newest
  local found
  found=$(command -v initdb || ls -d /usr/lib/postgresql/*/bin/initdb 2>/dev/null | sort -V | tail -1)
  if [ -n "$found" ]; then dirname "$(readlink -f "$found")"; fi
}

bin=$(find_bin)
if [ -z "$bin" ]; then
  echo "no PostgreSQL here (Debian: apt-get install postgresql); its tests are skipped" >&2
  exec "$@"
fi

folder=$(mktemp -d /tmp/autotune-postgres.XXXXXX)
as=()
if [ "$(id -u)" = 0 ]; then
  chown postgres "$folder"
  as=(runuser -u postgres --)
fi
cleanup() {
  (cd "$folder" && "${as[@]}" "$bin/pg_ctl" -D "$folder/data" -m immediate stop >/dev/null 2>&1) || true
  rm -rf "$folder"
}
trap cleanup EXIT

cd_run() { (cd "$folder" && "${as[@]}" "$@"); }
cd_run "$bin/initdb" -D "$folder/data" -U postgres -A trust --no-sync >"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 2; }
options="-c listen_addresses='' -c unix_socket_directories=$folder -c fsync=off"
cd_run "$bin/pg_ctl" -D "$folder/data" -l "$folder/server.log" -o "$options" -w start >/dev/null || {
  cat "$folder/server.log" >&2
  exit 2
}
AUTOTUNE_TEST_POSTGRES="postgresql://postgres@/postgres?host=$folder" "$@"

#!/usr/bin/env bash
# What some tests need beside Python: Chromium for pages, PostgreSQL for a sweep's workers. Debian's packages, installed
# when absent. CHROMIUM=/path names a browser that is here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

has_any() { for name in "$@"; do if command -v "$name" >/dev/null; then return; fi; done; return 1; }

missing=()
has_any "${CHROMIUM:-chromium}" chromium-browser google-chrome google-chrome-stable chrome || missing+=(chromium fonts-dejavu-core)
has_any initdb || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || missing+=(postgresql)
if [ ${#missing[@]} -eq 0 ]; then exit; fi
command -v apt-get >/dev/null || die "not here: ${missing[*]}, and there is no apt-get to install them with.
Next: install Chromium (or name it: CHROMIUM=/path/to/chromium) and PostgreSQL by this system's own means."
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
say "installing ${missing[*]}"
{ "${as_root[@]}" apt-get update -qq && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null ||
  die "apt-get could not install ${missing[*]}; its own message is above."

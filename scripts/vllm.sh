#!/usr/bin/env bash
# An environment for `rollout.engine: vllm` on a machine without GPU: ./scripts/vllm.sh [FOLDER]. Repeatable.
# With a GPU, `pip install "autotune-rl[train,vllm]"` in a fresh environment is all that is needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

folder=${1:-.venv-vllm}
stamp=$folder/.installed-$(cat pyproject.toml constraints/vllm.txt | cksum | cut -d' ' -f1)
make_venv "$folder"
if [ -e "$stamp" ]; then exit 0; fi
say "installing vLLM's CPU build into $folder"
pip=("$folder/bin/python" -m pip install --progress-bar off --quiet)
"${pip[@]}" "$(grep '^torch==' constraints/vllm.txt)" setuptools wheel
"${pip[@]}" --no-deps -r constraints/vllm.txt
"${pip[@]}" --no-deps -e .
touch "$stamp"

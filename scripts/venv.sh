# Sourced by quickstart.sh, test.sh and .ci/run: finds a Python, makes a virtual environment, installs into it.
# Everything here may be run again at any time; what is already there is kept.

export PIP_DISABLE_PIP_VERSION_CHECK=1
export DS_BUILD_OPS=0 # DeepSpeed's compiled operators are not used: no compiler is needed

say() { printf '\n\033[1m== %s\033[0m\n' "$*" >&2; }
die() {
  printf '\nerror: %s\n' "$*" >&2
  exit 2
}

# usable_python COMMAND LOW HIGH: it starts, LOW <= its 3.x version <= HIGH, and it can make environments.
usable_python() {
  "$1" - "$2" "$3" >/dev/null 2>&1 <<'PY'
import sys
import ensurepip, venv
low, high = int(sys.argv[1]), int(sys.argv[2])
sys.exit(not (sys.version_info[0] == 3 and low <= sys.version_info[1] <= high))
PY
}

# find_python: prints a Python 3.11 to 3.13; $PYTHON, when set, is the only candidate.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
    if usable_python "$candidate" 11 13; then
      command -v "$candidate"
      return
    fi
  done
  die "no usable Python among: ${PYTHON:-python3 python3.12 python3.11 python3.13}.
Expected Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip; python3 here is: $(python3 --version 2>&1).
Next: 'apt-get install python3 python3-venv' (Debian 12 or newer, Ubuntu 24.04 or newer) or 'pyenv install 3.12',
then run this again, or name another one: PYTHON=/path/to/python3.12 $0"
}

# make_venv FOLDER [PYTHON]: keeps an environment that still starts, replaces one that does not.
make_venv() {
  local folder=$1 python
  if [ -x "$folder/bin/python" ] && "$folder/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
  python=${2:-$(find_python)} || exit 2
  say "creating $folder with $("$python" --version)"
  "$python" -m venv --clear "$folder"
}

# install FOLDER PIP_ARGUMENT...: skipped when the same arguments were installed from the same two files before.
# CONSTRAINTS names another file of exact versions than constraints/main.txt.
install() {
  local folder=$1 stamp versions=${CONSTRAINTS:-constraints/main.txt}
  shift
  stamp=$folder/.installed-$(cat pyproject.toml "$versions" - <<<"$*" | cksum | cut -d' ' -f1)
  if [ -e "$stamp" ]; then return; fi
  say "installing $* into $folder"
  "$folder/bin/python" -m pip install --progress-bar off --quiet -c "$versions" "$@" || return 1
  touch "$stamp"
}

#!/usr/bin/env bash
# Print the path of a Python 3.12 or 3.13 that can make a virtual environment, or say what is missing (exit code 1).
# Candidates are run, not only looked at: a pyenv shim exists for every version and runs only for the chosen one.
set -euo pipefail

probe='
import sys
assert sys.version_info[:2] in ((3, 12), (3, 13)) and sys.implementation.name == "cpython"
import ctypes, ensurepip, ssl, venv
print(sys.executable)
'

names_on_path() {
    local name
    for name in python3.12 python3.13 python3 python; do
        # Every match, in the order of PATH: the first may be a shim that does not run.
        type -aP "$name" 2>/dev/null || true
    done
}

well_known() {
    local minor root
    for minor in 3.12 3.13; do
        for root in "${PYENV_ROOT:-}" "$HOME/.pyenv"; do
            [ -n "$root" ] && printf '%s\n' "$root/versions/$minor"*/bin/python3
        done
        printf '%s\n' "/usr/bin/python$minor" "/usr/local/bin/python$minor" "/opt/homebrew/bin/python$minor" \
            /opt/*/bin/python"$minor" "$HOME/.local/bin/python$minor"
    done
}

tried=""
while IFS= read -r candidate; do
    [ -x "$candidate" ] || continue
    # From / so that neither a .python-version file nor a module in the working directory decides.
    if found=$(cd / && "$candidate" -I -c "$probe" 2>/dev/null) && [ -x "$found" ]; then
        printf '%s\n' "$found"
        exit 0
    fi
    tried="$tried $candidate"
done < <(if [ -n "${PYTHON:-}" ]; then type -aP "$PYTHON" || true; else names_on_path; well_known; fi)

if [ -n "${PYTHON:-}" ]; then
    echo "PYTHON=$PYTHON is not a Python 3.12 or 3.13 that runs with its venv and ensurepip modules; name another" \
        "one, or leave PYTHON unset to have one looked for." >&2
else
    echo "No usable Python 3.12 or 3.13 was found (with its venv, ensurepip, ssl and ctypes modules) on PATH, in" \
        "pyenv, or in the usual folders; install one (pyenv install 3.12, or the packages python3.12 and" \
        "python3.12-venv), or name it: make PYTHON=/path/to/python3.12. Tried and refused:${tried:- nothing}." >&2
fi
exit 1

#!/usr/bin/env bash
# Make .venv and install the project with the pinned versions of constraints.txt, and for the tests the packages of
# tests/requirements-oracle.txt without their dependencies. Does nothing when the last install finished from these
# two files and pyproject.toml; goes on where an interrupted one stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=.venv
stamp=$venv/installed-from
log=$venv/install.log
oracle=tests/requirements-oracle.txt
wanted="$(cat pyproject.toml constraints.txt "$oracle" | cksum) $PWD"

usable() { "$venv/bin/python" -c 'import sys; assert sys.version_info[:2] in ((3, 12), (3, 13)); import pip' 2>/dev/null; }

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && usable; then
    exit 0
fi

if ! usable; then
    python=$(tools/setup/find_python.sh)
    echo "Making $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"

# Print what pip is at: one line that renews itself on a terminal, nothing into a log file.
show_progress() {
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$log"
        if [ -t 1 ]; then
            case $line in
                Collecting* | *Downloading* | Installing* | Building* | *Preparing*) printf '\r\033[K  %.70s' "$line" ;;
            esac
        fi
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
}

# The pip configuration of the machine stays in force; its constraints, if any, hold beside these.
install() {
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        -c constraints.txt "$@" 2>&1 | show_progress; then
        grep -iE '^ *(error|hint)|conflict|no matching|no space' "$log" | tail -n 12 >&2 || tail -n 12 "$log" >&2
        echo "The install failed; the whole output is in $log. Run the same command again to go on." >&2
        exit 1
    fi
}

: >"$log"
started=$SECONDS
echo "Installing $(grep -c == constraints.txt) pinned packages into $venv (about 5 GB, once; details in $log)"
# The build backend first, pinned, so that nothing is built with another version fetched on the side.
install "$(grep '^setuptools==' constraints.txt)"
install --no-build-isolation --editable '.[test]'
# Built from its source, which asks torch what it is; none of its C++ extensions is.
DS_BUILD_OPS=0 install --no-build-isolation "$(grep '^deepspeed==' constraints.txt)"
install --no-deps --requirement "$oracle"
printf '%s' "$wanted" >"$stamp"
echo "Installed in $((SECONDS - started)) s"

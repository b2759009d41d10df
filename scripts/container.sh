#!/usr/bin/env bash
# Installs what the tests of container boxes and of Dockerfiles need: podman and runc, or the programs that are named
# (container.sh buildah). Skips what is there already.
# Exit code 0: they are there. Anything else: they are not, and the last line says why.
set -euo pipefail

stop() { printf 'container: %s\n' "$*" >&2; exit 1; }

missing=()
# runc, as podman's own choice (crun) refuses machines that have both kinds of cgroups.
[ "$#" -gt 0 ] || set -- podman runc
for program in "$@"; do
  command -v "$program" >/dev/null || missing+=("$program")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
command -v apt-get >/dev/null || stop "missing: ${missing[*]}; install them with this system's package manager"
[ "$(id -u)" = 0 ] || stop "missing: ${missing[*]}; run: sudo apt-get install -y ${missing[*]}"

printf 'container: installing %s\n' "${missing[*]}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
"$(dirname "$0")/apt.sh" "$log" "${missing[@]}" || stop "apt-get failed: $(tail -n 3 "$log" | tr -s '[:space:]' ' ')"

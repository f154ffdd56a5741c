#!/usr/bin/env bash
# Refuses committed symbolic links that point outside the repository.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$(pwd -P)
git ls-files -s | { grep '^120000' || true; } | cut -f2 | while IFS= read -r link; do
    case $(readlink -m "$link") in
        "$root"/*) ;;
        *) echo "$link: a committed link that points outside: $(readlink "$link")" >&2; exit 1 ;;
    esac
done

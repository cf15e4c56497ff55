#!/bin/sh
# Writes ../NOT_MODELLED.md from the table and the sources; `cargo test --test resolver` says when it is stale.
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 1
implemented=$(mktemp)
cat src/api/*.rs | tr '\n' ' ' | grep -oE 'fn cu[A-Za-z0-9_]+( \| cu[A-Za-z0-9_]+)?' | grep -oE 'cu[A-Za-z0-9_]+' | sort > "$implemented"
{
    echo '# Exported, not modelled'
    echo
    echo 'These symbols exist and return `CUDA_ERROR_NOT_SUPPORTED`.'
    echo 'Written by `symbols/list-not-modelled.sh`.'
    echo
    tail -n +2 symbols/symbols.csv | cut -d, -f4 | sort | comm -23 - "$implemented" | sed 's/.*/- `&`/'
} > NOT_MODELLED.md
rm -f "$implemented"

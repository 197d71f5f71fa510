#!/bin/sh
# Serves /data, or a generated sample if /data is empty. PENSTOCK_DATA is the folder's name on the host, if the user gave one.
# An empty folder is then an error, unless PENSTOCK_SAMPLE=yes. With PENSTOCK_SAMPLE=no, an empty folder is always an error.
set -eu
# The first start makes two tokens: one for trainers and people, and one for Prometheus.
if [ -n "${PENSTOCK_TOKENS:-}" ]; then
    secrets=$(dirname "$PENSTOCK_TOKENS")
    if ! [ -e "$PENSTOCK_TOKENS" ]; then
        token=$(penstock token create compose --scope admin 2>/dev/null)
        echo "$token" >"$secrets/token"
        token=$(penstock token create prometheus --scope metrics 2>/dev/null)
        echo "$token" >"$secrets/metrics-token"
    fi
    if [ "${PENSTOCK_INSECURE:-}" = yes ]; then
        unset PENSTOCK_TOKENS
    elif [ -e "$secrets/token" ]; then
        echo "callers need a token: export PENSTOCK_TOKEN=\$(docker compose exec -T server cat $secrets/token)"
    fi
fi
if [ -n "${PENSTOCK_DATA_DIR:-}" ]; then
    exec penstock serve
fi
if ! [ -e /data ]; then
    echo "there is no /data: mount a folder of datasets there, -v FOLDER:/data:ro, or an empty one for a sample" >&2
    exit 2
fi
if ! { [ -r /data ] && [ -x /data ]; }; then
    echo "/data cannot be read by user $(id -u): correct its permissions" >&2
    exit 2
fi
# For find, symlinks that form a loop or are broken are errors: ignore its exit status.
found=$(find -L /data -iname '*.parquet' -print -quit 2>/dev/null) || :
if [ -n "$found" ]; then
    exec penstock serve /data
fi
hidden=$(find -L /data -type d ! \( -readable -executable \) -print -prune -quit 2>/dev/null) || :
if [ -n "$hidden" ]; then
    echo "$hidden cannot be read by user $(id -u): correct its permissions" >&2
    exit 2
fi
other=$(find -L /data -type f ! -path '*/.*' -print -quit 2>/dev/null) || :
if [ -n "$other" ]; then
    echo "no *.parquet below /data, but $other: make shards of such files by penstock import, or empty the folder to serve a sample" >&2
    exit 2
fi
if [ "${PENSTOCK_SAMPLE:-${PENSTOCK_DATA:+no}}" = no ]; then
    echo "the data folder ${PENSTOCK_DATA:-/data} is empty: check that its name is right and its disk is mounted." \
        "To serve a generated sample instead, unset PENSTOCK_DATA and PENSTOCK_SAMPLE" >&2
    exit 2
fi
echo "/data is empty: serving a generated sample"
penstock sample /tmp/sample
exec penstock serve /tmp/sample

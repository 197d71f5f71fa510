#!/bin/sh
# Serves the URLs in PENSTOCK_DATA_DIR if it is set. Otherwise it serves /data, or a generated sample if /data is empty.
# PENSTOCK_DATA is the folder's name on the host, if the user gave one. An empty folder is then an error, unless
# PENSTOCK_SAMPLE=yes. With PENSTOCK_SAMPLE=no, an empty folder is always an error.
set -eu
# The first start makes tokens: one for people, one for the demo's trainer, and one for Prometheus. The latter two are in volumes
# of their own, so that their containers see no other token.
if [ -n "${PENSTOCK_TOKENS:-}" ]; then
    secrets=$(dirname "$PENSTOCK_TOKENS")
    new=$secrets/new-tokens.json
    make_token() { # NAME SCOPE FILE
        said=$(penstock token create "$1" --scope "$2" --tokens "$new" 2>&1 >"$3") || {
            echo "$said" >&2
            exit 2
        }
    }
    if ! [ -e "$PENSTOCK_TOKENS" ]; then
        mkdir -p "$secrets/trainer" "$secrets/metrics"
        rm -f "$new"
        (
            umask 077
            make_token compose admin "$secrets/token"
            make_token trainer read "$secrets/trainer/token"
            make_token prometheus metrics "$secrets/metrics/token"
        )
        chmod 644 "$secrets/metrics/token" # Prometheus is another user
        mv "$new" "$PENSTOCK_TOKENS" # last, so that a start that was interrupted begins anew
    fi
    if [ "${PENSTOCK_INSECURE:-}" = yes ]; then
        unset PENSTOCK_TOKENS
    elif [ -r "$secrets/token" ]; then
        echo "callers need a token: export PENSTOCK_TOKEN=\$(docker compose exec -T server cat $secrets/token)"
    else
        echo "callers need a token: penstock token create NAME makes one in this container"
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

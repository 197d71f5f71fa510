#!/bin/sh
# Serves /data, or a generated sample if that is empty. PENSTOCK_DATA is the folder's name on the host, if the user gave one: an
# empty folder is an error then, unless PENSTOCK_SAMPLE=yes. With PENSTOCK_SAMPLE=no it always is.
set -eu
if ! [ -e /data ]; then
    echo "there is no /data: mount a folder of datasets there, -v FOLDER:/data:ro, or an empty one for a sample" >&2
    exit 2
fi
if ! { [ -r /data ] && [ -x /data ]; }; then
    echo "/data cannot be read by user $(id -u): mend its permissions" >&2
    exit 2
fi
# Links that lead back, or nowhere, are errors to find.
found=$(find -L /data -iname '*.parquet' -print -quit 2>/dev/null) || :
if [ -n "$found" ]; then
    exec penstock serve /data
fi
hidden=$(find -L /data -type d ! \( -readable -executable \) -print -prune -quit 2>/dev/null) || :
if [ -n "$hidden" ]; then
    echo "$hidden cannot be read by user $(id -u): mend its permissions" >&2
    exit 2
fi
other=$(find -L /data -type f ! -path '*/.*' -print -quit 2>/dev/null) || :
if [ -n "$other" ]; then
    echo "no *.parquet below /data, but $other: make shards of such files by penstock import, or empty the folder for a sample" >&2
    exit 2
fi
if [ "${PENSTOCK_SAMPLE:-${PENSTOCK_DATA:+no}}" = no ]; then
    echo "the data folder ${PENSTOCK_DATA:-/data} is empty: check that its name is right and its disk is mounted." \
        "Without PENSTOCK_DATA and PENSTOCK_SAMPLE a generated sample is served" >&2
    exit 2
fi
echo "/data is empty: serving a generated sample"
penstock sample /tmp/sample
exec penstock serve /tmp/sample

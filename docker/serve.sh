#!/bin/sh
# Serves /data if it holds datasets, else a generated sample.
set -eu
if [ -n "$(find -L /data -name '*.parquet' -print -quit 2>/dev/null)" ]; then
    exec penstock serve /data
fi
echo "no *.parquet below /data: serving a generated sample"
penstock sample /tmp/sample
exec penstock serve /tmp/sample

#!/bin/sh
# Serves /data if it holds datasets, else a generated sample.
set -eu
found=$(find -L /data -name '*.parquet' -print -quit) # fails, and the container with it, where /data cannot be read
if [ -n "$found" ]; then
    exec penstock serve /data
fi
echo "no *.parquet below /data: serving a generated sample"
penstock sample /tmp/sample
exec penstock serve /tmp/sample

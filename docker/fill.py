"""Copies /data, or a generated sample if it holds no shards, to the URL of an object store."""

import subprocess
import sys
from pathlib import Path

import obstore
from obstore.store import from_url

data = Path("/data")
if not any(data.rglob("*.parquet")):
    data = Path("/tmp/sample")
    subprocess.run(["penstock", "sample", data], check=True)
store = from_url(sys.argv[1], client_options={"allow_http": True})
for path in data.rglob("*"):
    if path.is_file():
        obstore.put(store, str(path.relative_to(data)), path)

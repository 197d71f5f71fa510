"""Contents of data folders: shards, their footers, and snapshots."""

"""What the folders hold: shards, snapshots of them, and datasets, which gain a snapshot whenever their folder changes."""

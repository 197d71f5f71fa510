"""What the folders hold: shards, what their footers say, and snapshots of them."""

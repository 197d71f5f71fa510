"""Access control: tokens, TLS, and the watcher that reloads their files."""

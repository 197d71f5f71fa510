"""Who may do what: tokens, certificates, and files that are read again when they change."""

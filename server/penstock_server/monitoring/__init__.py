"""Monitoring: what ranks report, what the server measures, and both as JSON, as metrics and as one sentence."""

"""Blocks of tokens: read from shards, kept in the cache folder, mapped into memory, and watched for bad rows."""

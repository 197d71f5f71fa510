"""`penstock import`: convert CSV, JSON lines, Arrow, Parquet and files of token ids to Parquet shards.

The readers of `tables` report the columns of their files, `token_files` those of token ids; `schema` merges these into one
schema; a second pass reads the rows, casts them, and `shards` writes them.
"""

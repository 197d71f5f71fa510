"""`penstock import`: convert CSV, JSON lines, Arrow, Parquet, MDS, LitData and files of token ids to Parquet shards.

`inputs` finds the files, on this machine or in an object store. The readers of `tables` report the columns of their files,
`token_files` those of token ids, `mds` and `litdata` those of the `row_files` in a folder; `schema` merges these into one;
a second pass reads the rows, casts them, and `shards` writes them.
"""

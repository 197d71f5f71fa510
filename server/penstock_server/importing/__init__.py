"""`penstock import`: convert CSV, JSON lines, Arrow and Parquet files to Parquet shards that suit the server.

files ──▶ a source each   jsonl, delimited with rows, columnar; stream under the first two
│ survey: one pass that finds the types
▼
one schema for all        columns
│ tables: a second pass, some MiB at a time
▼
shards                    shards; run puts it all together, command is what a person types
"""

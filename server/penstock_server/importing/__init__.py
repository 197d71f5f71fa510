"""`penstock import`: CSV, JSON lines, Arrow and Parquet files become Parquet shards of the shape the server reads best.

files ──▶ a source each   jsonl, delimited with rows, columnar; stream under the first two
│ survey: one pass that finds the types
▼
one schema for all        columns
│ tables: a second pass, some MiB at a time
▼
shards                    shards; run puts it all together, command is what a person types
"""

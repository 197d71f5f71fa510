"""Blocks of tokens: read from shards, kept in the cache folder, mapped into memory. Each module uses those above it.

block       the tokens of a block's rows, as views of its bytes
cache       files of blocks within a budget, and the blocks that are mapped
decode      rows of a shard, by the address of a block; the name of its file
on_demand   rows that a cold batch needs, tokenized before the rest of their block
prefetch    blocks that jobs need next, made in the background
store       a block by its address: mapped, read from its file, or decoded once for all callers
quarantine  bad rows and row groups
loader      the blocks of one snapshot by their index; what the other packages use
"""

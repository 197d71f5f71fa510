"""Recipes: how the columns of a row become tokens.

penstock.toml ─▶ config ──▶ recipe: a Recipe, checked against each shard
schema ────────▶ infer ─┘   its parts: fields, filter and terms, transform, tokenizer, chat with answers and messages

rows of a shard ─▶ encode.Selected.of: filter, split hashes ─▶ .transformed ─▶ encode.encode:
    lists of ids    ─▶ token_ids: masks, BOS and EOS              ─┐
    texts and chats ─▶ text: chat templates, tokenizer, BOS, EOS  ─┴▶ ids of each row, runs with loss, and why rows are bad
"""

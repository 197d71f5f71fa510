"""Preference pairs of texts or chats to tokens: each side is an answer to a common prompt."""

from __future__ import annotations

from penstock_server.recipes.chat_rows import Chat, read_chats, read_tools, tokenized_chats
from penstock_server.recipes.rows import Rows
from penstock_server.recipes.texts import tokenized
from penstock_server.recipes.turns import Lists, every, with_turns


def preferences(rows: Rows) -> dict[str, Lists]:
    """Return both sides of each pair, after its prompt. Chats without a prompt share their common first messages as one."""
    roles = dict(rows.recipe.fields)
    if rows.recipe.chat:
        chats, tools = {role: read_chats(rows, role) for role in roles}, read_tools(rows)
        parted = {side: _parted(chats, side) for side in rows.recipe.features}
        return {side: tokenized_chats(rows, side, answers, tools, prompts) for side, (answers, prompts) in parted.items()}
    has_prompt = "prompt" in roles
    chosen = tokenized(rows, "chosen", opens=not has_prompt, closes=True)
    prompts = tokenized(rows, "prompt", opens=True) if has_prompt else every([], len(rows))
    rejected = tokenized(rows, "rejected", opens=not has_prompt, closes=True)
    return {"chosen": with_turns([prompts, chosen]), "rejected": with_turns([prompts, rejected])}


def _parted(chats: dict[str, list[Chat]], side: str) -> tuple[list[Chat], list[Chat]]:
    """Split the chats of one side into the answers and the messages before them, which have no loss."""
    if "prompt" in chats:
        return chats[side], chats["prompt"]
    shared = map(_shared, chats["chosen"], chats["rejected"])
    parted = [(chat[length:], chat[:length]) for chat, length in zip(chats[side], shared, strict=True)]
    return [answers for answers, _ in parted], [prompt for _, prompt in parted]


def _shared(chosen: Chat, rejected: Chat) -> int:
    """Return the number of common first messages; at least the last message of each chat is an answer."""
    longest = max(0, min(len(chosen), len(rejected)) - 1)
    return next((i for i in range(longest) if chosen[i] != rejected[i]), longest)

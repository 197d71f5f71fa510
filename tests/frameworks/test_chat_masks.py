"""What has loss of a chat is what transformers' own masks of the assistant's tokens say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from penstock_server.recipes.chat import ChatTemplate
from penstock_server.recipes.tokenizer import load_tokenizer
from support.chat_templates import STEADY, TOKENS, marked
from support.corpora import none_is_bad, write_tokenizer

LIBRARY = "transformers"
CONTENTS = ["yes", "Yes, sir", "über two\n\nlines", "  no", "a b "]


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("way", [str, marked])
def test_chat_loss_equals_the_masks_of_transformers(name: str, way: Callable[[str], str], tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    path = write_tokenizer(tmp_path / "tokenizer.json", [f"{role}: yes" for role in ("Assistant", "User")] + CONTENTS)
    tokenizer, theirs = load_tokenizer(path), PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert tokenizer.tokenizer.token_to_id("Ġyes") is not None
    template = ChatTemplate(text=way(STEADY[name]), special_tokens=TOKENS)
    for asked, answered in product(CONTENTS, repeat=2):
        chat = [{"role": role, "content": text} for role, text in (("user", asked), ("assistant", answered)) * 2]

        rendered = template.render(chat)
        ids, _, in_loss = tokenizer.encode_marked([rendered.text], [rendered.spans], none_is_bad)

        expected = theirs.apply_chat_template(
            chat, chat_template=marked(STEADY[name]), return_assistant_tokens_mask=True, return_dict=True, **TOKENS
        )
        assert ids.tolist() == expected["input_ids"]
        assert in_loss.astype(int).tolist() == expected["assistant_masks"]

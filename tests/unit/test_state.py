"""A state is taken by every dataset whose samples stand in the same order, and by no other."""

from typing import Any

import pytest

from penstock import Spec, StateMismatch
from penstock.state import Position, read_state, write_state

HERE = Position(epoch=2, step=5)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"group_by_length": 16, "seq_len": 64}, {"seq_len": 128}),
        ({"group_by_length": 16, "seq_len": 64}, {"task": "seq2seq"}),
        ({"long_rows": "split", "seq_len": 64}, {"seq_len": 128}),
        ({"packing": "best_fit", "seq_len": 64}, {"seq_len": 128}),
        ({"split": "train"}, {"split": "all"}),
        ({"mix": "a:1,b:1"}, {"mix": "a:1,b:2"}),
    ],
)
def test_what_changes_the_order_is_refused(then: dict[str, Any], now: dict[str, Any]) -> None:
    state = write_state("a", Spec(**then), HERE)
    with pytest.raises(StateMismatch, match=f"{next(iter(now))}: "):
        read_state(state, "a", Spec(**(then | now)))


@pytest.mark.parametrize("now", [{"seq_len": 128}, {"pad": "longest"}, {"tail": "wrap"}, {"loss": "all"}])
def test_what_leaves_the_order_as_it_is_does_not_matter(now: dict[str, Any]) -> None:
    assert read_state(write_state("a", Spec(seq_len=64), HERE), "a", Spec(**({"seq_len": 64} | now))) == HERE

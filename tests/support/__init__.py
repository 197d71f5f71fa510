"""What tests share: corpora, servers, processes, the engine, ledgers."""

from typing import Any

from hypothesis import settings


def examples(number: int, **others: Any) -> settings:
    """This number of examples if other property tests have 100 or more, and proportionally fewer below."""
    return settings(max_examples=max(3, number * min(settings().max_examples, 100) // 100), **others)

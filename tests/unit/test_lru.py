"""Results are kept by use, within a number and a budget of bytes."""

from __future__ import annotations

from penstock_server.lru import LruCache


def test_results_used_last_are_kept_within_the_budget() -> None:
    made = list[str]()

    def get(key: str) -> str:
        def make() -> str:
            made.append(key)
            return key

        return kept.get(key, make)

    kept = LruCache[str](6, len, most=3)
    for key in ("aa", "bb", "aa", "cc", "dd", "aa", "bb"):
        assert get(key) == key
    assert made == ["aa", "bb", "cc", "dd", "bb"]  # the fourth took the place of bb
    assert get("eeeeee") == "eeeeee"  # it takes the whole budget
    get("aa")
    assert made == ["aa", "bb", "cc", "dd", "bb", "eeeeee", "aa"]

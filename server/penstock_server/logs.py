"""The log: what happens while a server runs, on stderr, a line each with its time."""

from __future__ import annotations

import logging


def begin_log(*, tells_news: bool) -> None:
    """From now on. How datasets change is told only with `tells_news`: all processes see it, and one of them is to tell it."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("penstock.dataset").setLevel(logging.INFO if tells_news else logging.ERROR)

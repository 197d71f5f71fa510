"""Measures one ratio in a separate process, which run.py starts. The last printed line is its rows, as JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ratios.NAMES)
    parser.add_argument("work", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float)
    asked = parser.parse_args()
    scale = (ratios.quick if asked.quick else ratios.full)(asked.work, asked.minutes)
    rows = import_module(f"ratios.{asked.name}").measure(scale)
    print("\n" + json.dumps([asdict(row) for row in rows]), flush=True)


if __name__ == "__main__":
    main()

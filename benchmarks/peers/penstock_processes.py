"""Penstock as penstock_http has it, served by two processes of one port: a run is made in the one while the other sends one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import servers
from corpus import Corpus
from peers import penstock_http


def serve(corpus: Corpus, folder: Path) -> None:
    command = [*servers.serve_command(corpus.parquet, folder), "--processes", "2"]
    os.execv(command[0], command)


PEER = replace(penstock_http.PEER, name="Penstock, two server processes", serve=serve)

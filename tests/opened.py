"""Datasets as tests open them, without a server."""

from collections.abc import Callable

from penstock_server.blocks.block import Block
from penstock_server.blocks.loader import Blocks
from penstock_server.catalog.catalog import Catalog

Opener = Callable[..., Catalog]
Loader = Callable[[], tuple[Blocks, Block]]

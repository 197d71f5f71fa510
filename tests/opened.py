"""Datasets as tests open them, without a server."""

from collections.abc import Callable

from penstock_server.datasets.catalog import Catalog
from penstock_server.storage.block import Block
from penstock_server.storage.blocks import Blocks

Opener = Callable[..., Catalog]
Loader = Callable[[], tuple[Blocks, Block]]

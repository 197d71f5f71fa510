"""Opening: the catalog of a command, and the warnings about its datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable

from penstock.cli.output import complain
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.warnings import advice_on_data, advice_on_folder
from penstock_server.settings import Settings, SettingsError


def open_data(settings: Settings) -> Catalog:
    """Open the catalog of the settings.

    Raises SettingsError: the cache folder cannot be used. Raises DatasetInvalid: see open_catalog.
    """
    try:
        store = BlockStore(settings.cache_dir, settings.cache_bytes, settings.num_decoders, settings.max_decoded_bytes)
    except OSError as error:
        raise SettingsError(
            f"the cache folder {settings.cache_dir} cannot be used by user {os.getuid()}: {error.strerror}. Name another with "
            f"--cache-dir."
        ) from error
    return open_catalog(settings.data_dir, settings.tokenizer, store)


def warn(command: str, settings: Settings, datasets: Iterable[OpenSnapshot]) -> None:
    """Print warnings about the data folder and these datasets, before they are read."""
    for sentence in (*advice_on_folder(settings.data_dir), *advice_on_data(datasets)):
        complain(command, sentence)

"""Footers that are kept parsed."""

import os
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blocks_of import rows_of
from corpora import write_shards
from penstock_server.blocks import decode as decode_module
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.decode import ParsedFooters
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.shard import open_shard, stat_of
from planned import open_snapshot


def test_the_footer_of_a_shard_is_parsed_once_and_again_once_it_is_another_file(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, read = [], pq.read_metadata

    def counted(file: pa.OSFile) -> pq.FileMetaData:
        parsed.append(str(Path(f"/proc/self/fd/{file.fileno()}").readlink()))
        return read(file)

    monkeypatch.setattr(pq, "read_metadata", counted)
    path = tmp_path / "one" / "part-000.parquet"
    for day in range(2):
        tokens = [[500 * day + n] for n in range(60)]
        write_shards(path.parent, "tokens", [tokens], type_=pa.list_(pa.int32()), row_group_size=10)
        os.utime(path, (day, day))  # what was written just now is not remembered
        blocks = Blocks(open_snapshot(path.parent), BlockStore(CacheFolder(cache_dir)))
        assert [row for index in range(6) for row in rows_of(blocks.get([index])[0])] == tokens
    assert parsed == [str(path)] * 2


def test_the_footers_read_last_are_kept_within_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=pq.read_metadata)
    monkeypatch.setattr(pq, "read_metadata", read)
    folder = write_shards(tmp_path / "d", "tokens", [[[1]]] * 4, type_=pa.list_(pa.int32()), row_group_size=1)
    shards = open_snapshot(folder).shards
    # The shards whose footers are parsed, by the number of footers that the budget has room for.
    for room, parsed in ((4, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 1, 0]), (0, [0, 1, 0, 2, 3, 1, 0, 1])):
        monkeypatch.setattr(decode_module, "_FOOTER_BYTES", room * pq.read_metadata(shards[0].path).serialized_size)
        footers, numbers = ParsedFooters(), list[int]()
        for number in (0, 1, 0, 0, 2, 3, 1, 0, 0, 1):
            read.reset_mock()
            with open_shard(shards[number]) as file:
                assert footers.of(shards[number].path, file, stat_of(file)).num_rows == 1
            numbers += [number] * read.call_count
        assert numbers == parsed

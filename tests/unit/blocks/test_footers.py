"""Footers that are kept parsed."""

import os
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blocks_of import rows_of
from corpora import write_shards
from penstock_server.blocks import decode as parsed_footers_module
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


def test_the_footers_of_the_shards_that_were_read_last_are_kept_within_a_budget_and_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(side_effect=pq.read_metadata)
    monkeypatch.setattr(pq, "read_metadata", read)
    folder = write_shards(tmp_path / "d", "tokens", [[[1]]] * 4, type_=pa.list_(pa.int32()), row_group_size=1)
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    shards = open_snapshot(folder).shards
    four, three, one = [0, 1, 2, 3], [0, 1, 2, 3, 1, 0], [0, 1, 0, 2, 3, 1, 0, 1]  # what is read, by how many are kept
    for budget, most, numbers_read in ((4, 4, four), (3, 4, three), (0, 4, one), (4, 3, three), (4, 1, one)):
        monkeypatch.setattr(parsed_footers_module, "_FOOTER_BYTES", budget * pq.read_metadata(shards[0].path).serialized_size)
        monkeypatch.setattr(parsed_footers_module, "_MAX_FOOTERS", most)
        footers, found = ParsedFooters(), list[int]()
        for number in (0, 1, 0, 0, 2, 3, 1, 0, 0, 1):
            read.reset_mock()
            with open_shard(shards[number]) as file:
                assert footers.of(shards[number].path, file, stat_of(file)).num_rows == 1
            found += [number] * read.call_count
        assert found == numbers_read


@pytest.mark.parametrize("is_written_to_meanwhile", [False, True])
def test_a_footer_is_not_kept_of_a_shard_that_was_written_to_just_now_or_while_it_was_read(
    data: Path, monkeypatch: pytest.MonkeyPatch, is_written_to_meanwhile: bool
) -> None:
    [shard, *_] = open_snapshot(data).shards
    if is_written_to_meanwhile:
        os.utime(shard.path, (0, 0))
    footers, read = ParsedFooters(), pq.read_metadata

    def writing(file: pa.OSFile) -> pq.FileMetaData:
        if is_written_to_meanwhile:
            os.utime(shard.path, (1, 1))
        return read(file)

    counted = Mock(side_effect=writing)
    monkeypatch.setattr(pq, "read_metadata", counted)
    with open_shard(shard) as file:
        date = stat_of(file)
        for _ in range(2):
            footers.of(shard.path, file, date)
    assert counted.call_count == 2

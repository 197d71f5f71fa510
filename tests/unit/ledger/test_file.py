"""The file of a ledger: what is in it, and what is left of it, whatever happens."""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path

import pytest

from ledger_files import SPEC, book, digest, entries, open_at, record
from ledgers import begin_of, behind, line, lines_of, round_at
from penstock import LedgerError
from penstock.audit.reading import read_ledger
from penstock.ledger import recorder as book_module
from penstock.ledger.begin import Begin


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    for epoch in (4, 5):
        ledger = data.open(SPEC, 1000, round_at(epoch=epoch, step=7, num_loads=2), behind(epoch - 4))
        record(ledger, 7, 8, 10**15)
        if epoch == 4:
            ledger.finish()
        ledger.close()
    reading = read_ledger(path)
    first, second = reading.parts
    assert (first.has_end, second.has_end, reading.damages) == (True, False, [])
    assert entries(reading) == 2 * [(step, digest(step)) for step in (7, 8, 10**15)]
    assert first.begin == Begin(
        launch=first.begin.launch, num_loads=2, iteration=0, dataset="numbers", num_samples=1000, rank=0,
        epoch=4, step=7, spec=SPEC, time=first.begin.time,
    )  # fmt: skip
    assert (second.begin.epoch, second.begin.iteration, second.begin.launch) == (5, 1, first.begin.launch)


def test_the_file_is_as_it_is_documented(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    ledger = open_at(path)
    record(ledger, 41)
    ledger.finish()
    ledger.close()
    begin, batch, end = path.read_text().splitlines()
    check = begin[-8:]
    assert begin == f"{begin[:-9]} {zlib.crc32(begin[:-9].encode()):08x}"
    assert batch == f"              41 {digest(41)} {zlib.crc32(f'{check}              41 {digest(41)}'.encode()):08x}"
    assert end == f"end {zlib.crc32(f'{check}end'.encode()):08x}"


def test_a_batch_is_in_the_file_before_the_loop_has_it(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    ledger = open_at(path)
    for step in range(3):
        record(ledger, step)
        assert len(entries(read_ledger(path))) == step + 1
    ledger.close()


def test_a_file_that_is_cut_off_anywhere_is_read_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    iteration, later = lines_of(begin_of(), [0, 1, 2], ends=True).encode(), lines_of(begin_of(epoch=1), []).encode()
    whole, first, end = iteration + later, iteration.index(b"\n") + 1, len(iteration)
    for cut in [*range(8), *range(8, first, 97), *range(first, end), *range(end, len(whole), 97)]:
        path.write_bytes(whole[:cut])
        before = entries(read_ledger(path))
        assert before == [(step, f"{step * 64:016x}") for step in range(max(0, min(cut, end) + 1 - first) // 43)]
        ledger = open_at(path)
        record(ledger, 9)
        ledger.close()
        reading = read_ledger(path)
        assert entries(reading) == [*before, (9, digest(9))]
        assert all(damage.is_torn and damage.first == damage.last for damage in reading.damages)
        open_at(path).close()  # once more
        is_whole = cut == 0 or whole[cut - 1 : cut] == b"\n" or whole[cut : cut + 1] == b"\n"
        assert len(reading.damages) == (0 if is_whole or cut == len(whole) else 1)


def test_what_a_file_system_leaves_of_a_write_that_never_came_is_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    for num_batches, whole in enumerate([b"", lines_of(begin_of(), [0]).encode()]):
        path.write_bytes(whole + bytes(4000))
        ledger = open_at(path)
        ledger.close()
        reading = read_ledger(path)
        assert (len(entries(reading)), [d.is_torn for d in reading.damages]) == (num_batches, [True])


def test_every_flipped_bit_is_seen_and_turns_no_batch_into_another(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    whole = (lines_of(begin_of(), [0, 1, 2]) + lines_of(begin_of(start=1, step=1), [1], ends=True)).encode()
    path.write_bytes(whole)
    sound = entries(read_ledger(path))
    begins = [number for number in range(len(whole)) if whole.rfind(b"begin", 0, number) > whole.rfind(b"\n", 0, number)]
    for number in sorted(set(range(len(whole))) - set(begins) | set(begins[::23])):
        for bit in range(8):
            path.write_bytes(whole[:number] + bytes([whole[number] ^ 1 << bit]) + whole[number + 1 :])
            reading = read_ledger(path)
            assert reading.damages, (number, bit)
            assert set(entries(reading)) <= set(sound)


def test_batches_whose_begin_line_is_lost_belong_to_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    lines = (lines_of(begin_of(), [0]) + lines_of(begin_of(start=1), [7, 8, 9])).splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    reading = read_ledger(path)
    assert (entries(reading), [(d.first, d.last) for d in reading.damages]) == ([(0, f"{0:016x}")], [(3, 5)])


def test_the_disk_is_told_to_write_now_and_then_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "_SYNC_SECONDS", 0.01)
    synced, real = threading.Event(), os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        synced.set()

    monkeypatch.setattr(os, "fsync", fsync)
    data = book(tmp_path / "run.ledger")
    assert synced.is_set()  # or a machine that goes down would lose the file with its name
    ledger = data.open(SPEC, 1000, round_at(), behind(0))
    for _ in range(3):
        synced.clear()
        assert synced.wait(30)
    monkeypatch.setattr(book_module, "_SYNC_SECONDS", 3600.0)
    before = threading.active_count()
    ledger.close()
    ledger.close()
    assert threading.active_count() == before - 1
    with pytest.raises(ValueError, match="is closed"):
        record(ledger, 0)


def test_a_ledger_of_another_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    text = begin_of().to_text()
    for old, new in [
        ('"ledger": 3', '"ledger": 4'),
        ('"seq_len"', '"sequence_length"'),
        ('"rank": 0', '"rank": "0"'),
        ('"step": 0', '"step": -1'),
        ('"num_samples": 100', '"num_samples": true'),
        ('"rank": 0', '"rank": 1'),
        ('"num_workers": 0', '"num_workers": 1000000'),
        ("+00:00", ""),
        ('"time": "2025', '"time": "9999'),
        ('"batch_size": 5', '"batch_size": 0'),
        ('"skip": null', '"skip": "5-4"'),
        ('"spec": {', '"spec": {{'),
        ('"spec": {', '"spec": ' + "[" * 100_000),
    ]:
        assert old in text
        path.write_text(line(text.replace(old, new)))
        with pytest.raises(LedgerError, match="Audit it with the penstock that wrote it"):
            read_ledger(path)


def test_what_is_no_ledger_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (
        ("text", b"one\ntwo\n"),
        ("word", b"one"),
        ("bytes", bytes(range(11, 256)) * 40_000),
        ("lines", b"1\n" * 9_000_000),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LedgerError, match="is no ledger"):
            read_ledger(tmp_path / name)
    with pytest.raises(LedgerError, match="none cannot be read: No such file or directory"):
        read_ledger(tmp_path / "none")

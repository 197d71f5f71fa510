"""Opening folders: which datasets are found, by what names, and what is in nobody's way."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from corpora import write_numbered, write_text
from opened import Opener
from penstock.spec import Spec
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog import dataset as dataset_module
from penstock_server.catalog.catalog import open_catalog
from penstock_server.catalog.reading import read_folder
from penstock_server.problems import DatasetInvalid, DatasetUnavailable, UnknownDataset
from penstock_server.serving.serve import _greeting
from penstock_server.settings import Settings
from planned import open_snapshot

TOML = "team/own/penstock.toml"


def test_every_folder_with_shards_is_a_dataset_named_after_it(data: Path, tokenizer: Path, open_all: Opener) -> None:
    write_text(data / "wiki", ["one"])
    write_numbered(data / "code" / "python", 3)
    (data / "empty").mkdir()
    write_numbered(data / ".hidden", 3)
    assert sorted(open_all(tokenizer).datasets) == ["code.python", "wiki"]


def test_a_folder_that_holds_shards_itself_is_a_dataset(data: Path, open_all: Opener) -> None:
    write_numbered(data, 3)
    assert list(open_all().datasets) == ["data"]


def test_a_missing_folder_a_file_and_a_folder_without_parquet_are_told_apart(data: Path, open_all: Opener) -> None:
    with pytest.raises(DatasetInvalid, match="data does not exist"):
        open_all()
    data.mkdir()
    (data / "notes.txt").write_text("no data")
    with pytest.raises(DatasetInvalid, match=r"holds no file that ends in \.parquet, nor does any folder below it"):
        open_all()
    shutil.rmtree(data)
    data.write_text("a file")
    with pytest.raises(DatasetInvalid, match="is a file, not a folder"):
        open_all()
    data.unlink()
    data.symlink_to(data)
    with pytest.raises(DatasetInvalid, match=f"cannot be looked into: {os.strerror(errno.ELOOP)}"):
        open_all()


def test_two_folders_of_one_name_are_both_refused(data: Path, open_all: Opener) -> None:
    write_numbered(data / "a.b", 3)
    write_numbered(data / "a" / "b", 3)
    write_numbered(data / "c", 3)
    catalog = open_all()
    assert list(catalog.datasets) == ["c"]
    assert "would both be the dataset 'a.b'" in catalog.refused["a.b"]


def test_a_mixture_takes_no_name_from_another_folder(data: Path, open_all: Opener) -> None:
    write_numbered(data / "c", 3)
    for folder in ("a.b", "a/b", "x/y"):
        (data / folder).mkdir(parents=True)
        (data / folder / "penstock.toml").write_text('mix = "c:1"')
    write_numbered(data / "x.y", 3)
    catalog = open_all()
    assert [*catalog.datasets, *catalog.mixtures] == ["c"]
    assert "would both be the dataset 'a.b'" in catalog.refused["a.b"]
    assert "would both be the dataset 'x.y'" in catalog.refused["x.y"]


def test_an_older_snapshot_is_known_after_a_server_was_away_for_months(data: Path, tmp_path: Path, open_all: Opener) -> None:
    folder = write_numbered(data / "ids", 30)
    older = open_all()["ids"].latest.snapshot.fingerprint
    (write_numbered(tmp_path / "more", 3, num_shards=1) / "part-000.parquet").rename(folder / "part-900.parquet")
    assert open_all()["ids"].latest.snapshot.fingerprint != older
    for notes in (tmp_path / "cache" / "notes").iterdir():
        os.utime(notes, (1, 1))
    assert open_all()["ids"].served(older).snapshot.num_rows == 30


def test_a_link_to_nothing_is_refused_and_never_a_shorter_epoch(data: Path) -> None:
    write_numbered(data, 30)
    (data / "part-999.parquet").symlink_to(data / "moved.parquet")
    with pytest.raises(DatasetInvalid, match=r"part-999.parquet cannot be read: No such file"):
        open_snapshot(data)


def test_links_that_lead_back_are_followed_once(data: Path, open_all: Opener) -> None:
    write_numbered(data / "n", 3)
    (data / "n" / "up").symlink_to(data)
    (data / "n" / "self").symlink_to(data / "n")
    (data / "n" / "n").symlink_to("n")
    assert list(open_all().datasets) == ["n"]


def test_folders_that_link_to_each_other_have_few_names(data: Path, open_all: Opener) -> None:
    names = [f"n{number}" for number in range(5)]
    for name in names:
        write_numbered(data / name, 3)
        for other in names:
            if other != name:
                (data / name / other).symlink_to(data / other)
    assert list(open_all().datasets) == sorted([*names, *(f"{a}.{b}" for a in names for b in names if a != b)])


def test_a_link_gives_a_dataset_a_second_name_and_takes_none_away(data: Path, open_all: Opener) -> None:
    write_numbered(data / "stories", 3)
    write_numbered(data / "more" / "deep", 3)
    catalog = open_all()
    (data / "latest").symlink_to("stories")
    (data / "again").symlink_to("more")
    (data / "more" / "up").symlink_to(data / "again")
    catalog.refresh("stories")
    catalog.refresh("latest")
    catalog.refresh("again.deep")
    for looked in (catalog, open_all()):
        assert (list(looked.datasets), looked.refused) == (["again.deep", "latest", "more.deep", "stories"], {})


def test_names_that_are_no_text_are_refused_in_words_that_an_answer_can_hold(data: Path, open_all: Opener) -> None:
    for name in ("good", "shard", "bad/cafe"):
        write_numbered(data / name, 9)
    (data / "bad" / "cafe").rename(data / "bad" / "caf\udce9")
    (data / "shard" / "part-001.parquet").rename(data / "shard" / "\udcff.parquet")
    (data / "other").mkdir()
    (data / "other" / "\udce9.csv").touch()
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    assert catalog.refused == {
        "bad.caf\\xe9": f"{data}/bad/caf\\xe9 has a name that is not UTF-8, and no URL could hold it. Rename it.",
        "shard": f"{data}/shard/\\xff.parquet has a name that is not UTF-8, and no answer could hold it. Rename it.",
    }
    with pytest.raises(UnknownDataset, match=r"holds \\xe9.csv and no file"):
        catalog["other"]
    data.rename(data.with_name("caf\udce9"))
    with pytest.raises(DatasetInvalid, match=r"caf\\xe9 has a name that is not UTF-8, .* or make a link to it"):
        open_catalog(data.with_name("caf\udce9"), None, BlockStore(CacheFolder(data.with_name("cache"))))
    data.symlink_to("caf\udce9")
    assert list(open_all().datasets) == ["good"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_is_refused_and_not_left_out(data: Path, open_all: Opener) -> None:
    write_numbered(data / "n", 3)
    write_numbered(data / "secret", 3)
    (data / "secret").chmod(0)
    assert "Permission denied" in open_all().refused["secret"]
    (data / "secret").chmod(0o700)


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EMFILE])
@pytest.mark.parametrize("away", [".", "team", "team/own"])
def test_where_a_folder_cannot_be_looked_into_all_below_it_is_served_on_and_told_why(
    data: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch, away: str, number: int
) -> None:
    for name in ("other", "team/own"):
        write_numbered(data / name, 3)
    (data / "team" / "mixed").mkdir()
    (data / "team" / "mixed" / "penstock.toml").write_text('mix = "other:1,team.own:1"')
    catalog = open_all()
    before = {name: served.snapshot.fingerprint for name, served in catalog.datasets.items()}

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: str | Path, *args: Any, **options: Any) -> Any:
            if Path(path).is_relative_to(data / away):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *args, **options)

        return called

    with monkeypatch.context() as patch:
        if number == errno.EMFILE:
            patch.setattr(os, "scandir", failing(os.scandir))
        else:
            patch.setattr(Path, "stat", failing(Path.stat))
        catalog.poll()
        expected = {name: name == "team.own" or away == "." for name in ("other", "team.own")}
        errors = {name: catalog[name].held.error or "" for name in expected}
        assert {name: "cannot be read: " in error for name, error in errors.items()} == expected
        assert {name: os.strerror(number) in error for name, error in errors.items()} == expected
        assert catalog.plan("team.mixed", Spec(batch_size=1, seq_len=2)).schedule.num_steps == 6
        with pytest.raises(DatasetInvalid, match=os.strerror(number)):
            catalog.refresh("team.own")
    assert {name: served.snapshot.fingerprint for name, served in catalog.datasets.items()} == before
    catalog.refresh("team.own")
    assert catalog["team.own"].held.error is None


def test_a_link_to_what_cannot_be_reached_is_refused_alone_unless_it_is_a_shard(data: Path, open_all: Opener) -> None:
    write_numbered(data / "other", 3)
    (data / "linked").symlink_to("x" * 300)  # longer than a name can be: asking what it is fails, as at a mount that died
    catalog = open_all()
    assert set(catalog.datasets) == {"other"}
    assert "linked cannot be read: File name too long" in catalog.refused["linked"]
    (data / "other" / "part-9.parquet").symlink_to("x" * 300)
    with pytest.raises(DatasetInvalid, match=r"part-9.parquet cannot be read: File name too long"):
        catalog.refresh("other")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (ZeroDivisionError, "because of a fault in penstock: ZeroDivisionError"),
        (pa.ArrowMemoryError, "for lack of memory: ArrowMemoryError"),
        (RuntimeError("can't start new thread"), "for lack of threads (for the server: raise its limit of processes"),
    ],
)
def test_what_goes_wrong_in_one_dataset_refuses_that_one_only(
    data: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch, fault: type[Exception] | Exception, told: str
) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "odd", 3)

    def read(folder: Path, *rest: Any, **more: Any) -> Any:
        if folder.name == "odd":
            raise fault
        return read_folder(folder, *rest, **more)

    monkeypatch.setattr(dataset_module, "read_folder", read)
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    assert told in catalog.refused["odd"]


@pytest.mark.parametrize(
    ("host", "told"),
    [("0.0.0.0", "localhost"), ("127.0.0.1", "localhost"), ("::", "[::1]"), ("::1", "[::1]"), ("fd00::7", "[fd00::7]")],
)
def test_a_server_tells_an_address_that_leads_to_it(data: Path, open_all: Opener, host: str, told: str) -> None:
    write_numbered(data / "numbers", 3)
    settings = Settings.read({"data_dir": str(data)}, {})
    greeting = _greeting(open_all(), settings, Mock(**{"getsockname.return_value": (host, 8000)}))
    assert set(re.findall(r"http://[^/\s]+", greeting)) == {f"http://{told}:8000"}


@pytest.mark.parametrize(
    ("published", "told"),
    [("127.0.0.1:9000", "localhost:9000"), ("192.0.2.7:8000", "192.0.2.7:8000"), ("[fd00::7]:80", "[fd00::7]:80")],
)
def test_the_greeting_names_the_published_address(data: Path, open_all: Opener, published: str, told: str) -> None:
    write_numbered(data / "numbers", 3)
    settings = Settings.read({"data_dir": str(data)}, {"PENSTOCK_PUBLISHED": published})
    greeting = _greeting(open_all(), settings, Mock(**{"getsockname.return_value": ("0.0.0.0", 8000)}))
    assert set(re.findall(r"http://[^/\s]+", greeting)) == {f"http://{told}"}


def test_who_asks_for_an_unknown_dataset_is_told_which_are_not_served(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "bad", 3)
    (data / "bad" / "penstock.toml").write_text('tokens = "none"')
    with pytest.raises(UnknownDataset, match=r"Served: good\. Not served, for reasons that GET .* gives: bad\.$"):
        open_all()["god"]


def test_who_asks_for_a_folder_of_other_files_is_told_to_import_them(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 3)
    (data / "raw" / "mail").mkdir(parents=True)
    (data / "raw" / "mail" / "a.csv").write_text("text\nx\n")
    with pytest.raises(UnknownDataset, match="mail holds a.csv and no file that ends in .parquet: make shards with"):
        open_all()["raw.mail"]


def test_shards_may_end_in_capitals(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 3)
    for shard in (data / "good").glob("*.parquet"):
        shard.rename(shard.with_suffix(".PARQUET"))
    assert open_all()["good"].latest.snapshot.num_rows == 3


def test_a_dataset_that_is_refused_holds_back_no_other(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 10)
    (data / "bad").mkdir()
    (data / "bad" / "half.parquet").write_bytes(b"PAR1" + bytes(100))
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    with pytest.raises(DatasetInvalid, match="half.parquet is truncated"):
        catalog["bad"].latest  # noqa: B018
    with pytest.raises(UnknownDataset, match="no dataset 'goood'. Did you mean 'good'"):
        catalog["goood"]
    shutil.rmtree(data / "good")
    with pytest.raises(DatasetInvalid, match=r"nothing in .* can be served(.|\n)*half.parquet is truncated"):
        open_all()


def test_a_reason_that_no_answer_can_hold_is_spelled_out(data: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "odd", 3)

    def read(folder: Path, *rest: Any, **more: Any) -> Any:
        if folder.name == "odd":
            raise ValueError("\udce9 is no text")
        return read_folder(folder, *rest, **more)

    monkeypatch.setattr(dataset_module, "read_folder", read)
    monkeypatch.setattr(dataset_module, "log", Mock())  # it is Python's own traceback
    catalog = open_all()
    assert "\\udce9 is no text" in catalog.refused["odd"]
    answer = TestClient(create_app(catalog, InFlight(1 << 30))).get("/v1/datasets")
    assert (answer.status_code, "\\\\udce9 is no text" in answer.text) == (200, True)


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("away", ["team", "team/own", "team/own/part-000.parquet", "team/own/part-001.parquet", TOML])
def test_runs_wait_for_what_a_server_that_was_started_anew_cannot_open_yet(
    data: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch, away: str, has_cache: bool
) -> None:
    write_numbered(data / "other", 3)
    (write_numbered(data / "team" / "own", 9, num_shards=3) / "penstock.toml").write_text("")
    spec = Spec(batch_size=1, snapshot=open_all()["team.own"].latest.snapshot.fingerprint)
    if not has_cache:
        shutil.rmtree(data.parent / "cache")
    for shard in (data / "team" / "own").glob("*.parquet"):  # or it would be remembered what is in it
        shard.touch()

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: str | Path, *args: Any, **options: Any) -> Any:
            if Path(path) == data / away:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return call(path, *args, **options)

        return called

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing(os.scandir))
        patch.setattr(Path, "open", failing(Path.open))
        patch.setattr("builtins.open", failing(open))
        catalog = open_all()
        with pytest.raises(
            DatasetUnavailable, match=rf"snapshot {spec.snapshot} may be served again.*Input/output error.* Its runs wait"
        ):
            catalog.plan("team.own", spec)
        with pytest.raises(DatasetInvalid, match="Input/output error"):
            catalog.plan("team.own", replace(spec, snapshot=None))
    with suppress(DatasetInvalid):
        catalog.refresh("team.own")
    assert catalog.plan("team.own", spec).schedule.num_steps == 9


def test_runs_of_a_mixture_wait_for_what_declares_it(data: Path, open_all: Opener) -> None:
    for name in ("a", "b"):
        write_numbered(data / name, 3)
    (data / "m").mkdir()
    toml = data / "m" / "penstock.toml"
    toml.write_text('mix = "a:1,b:1"')
    spec = open_all().plan("m", Spec(batch_size=1)).spec
    toml.write_text("mix = ")
    catalog = open_all()
    for asked in (spec, Spec(batch_size=1, snapshot=spec.snapshot)):
        with pytest.raises(DatasetUnavailable, match="may be served again: .*penstock.toml"):
            catalog.plan("m", asked)
    with pytest.raises(DatasetInvalid, match="penstock.toml"):
        catalog.plan("m", Spec(batch_size=1))
    with pytest.raises(UnknownDataset):
        catalog.plan("m.other", Spec(batch_size=1))

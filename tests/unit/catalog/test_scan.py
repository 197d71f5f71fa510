"""Scan of the data folder: which datasets are found, by which names."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.spec import Spec
from penstock_server.problems import DatasetInvalid, UnknownDataset
from support.corpora import write_numbered, write_text
from support.engine import Opener


def test_folders_with_shards_are_datasets(data: Path, tokenizer: Path, open_all: Opener) -> None:
    write_text(data / "wiki", ["one"])
    for shard in write_numbered(data / "code" / "python", 3).glob("*.parquet"):
        shard.rename(shard.with_suffix(".PARQUET"))
    (data / "empty").mkdir()
    write_numbered(data / ".hidden", 3)
    assert sorted(open_all(tokenizer).datasets) == ["code.python", "wiki"]
    write_numbered(data, 3)
    assert sorted(open_all(tokenizer).datasets) == ["code.python", "data", "wiki"]


def test_data_folder_without_data_is_refused_with_the_reason(data: Path, open_all: Opener) -> None:
    with pytest.raises(DatasetInvalid, match=os.strerror(errno.ENOENT)):
        open_all()
    data.mkdir()
    (data / "notes.txt").write_text("no data")
    with pytest.raises(DatasetInvalid, match=r"holds no file that ends in \.parquet"):
        open_all()
    (data / "notes.txt").unlink()
    data.rmdir()
    data.write_text("a file")
    with pytest.raises(DatasetInvalid, match=os.strerror(errno.ENOTDIR)):
        open_all()


def test_folders_of_one_name_are_refused(data: Path, open_all: Opener) -> None:
    write_numbered(data / "c", 3)
    write_numbered(data / "a.b", 3)
    write_numbered(data / "a" / "b", 3)
    write_numbered(data / "x.y", 3)
    (data / "x" / "y").mkdir(parents=True)
    (data / "x" / "y" / "penstock.toml").write_text('mix = "c:1"')
    catalog = open_all()
    assert [*catalog.datasets, *catalog.mixtures] == ["c"]
    assert "would both be the dataset 'a.b'" in catalog.refused["a.b"]
    assert "would both be the dataset 'x.y'" in catalog.refused["x.y"]


def test_symlinks_in_a_circle_are_followed_once(data: Path, open_all: Opener) -> None:
    names = ["a", "b", "c"]
    for name in names:
        write_numbered(data / name, 3)
        (data / name / name).symlink_to(name)
        (data / name / "up").symlink_to(data)
        for other in names:
            if other != name:
                (data / name / other).symlink_to(data / other)
    assert list(open_all().datasets) == sorted([*names, *(f"{a}.{b}" for a in names for b in names if a != b)])


def test_names_that_are_not_utf8_are_refused_alone(data: Path, open_all: Opener) -> None:
    for name in ("good", "shard", "odd", "below"):
        write_numbered(data / name, 9)
    (data / "odd").rename(data / "\udcff")
    (data / "below").rename(data / "good" / "\udcfe")
    (data / "shard" / "part-001.parquet").rename(data / "shard" / "\udcff.parquet")
    write_numbered(data / "linked", 9)
    (data / "linked" / "\udcff.parquet").symlink_to("/etc/hostname")
    (data / "\udcff.txt").write_text("no data")
    (data / "\udcff.parquet").write_text("a shard of the data folder itself")
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    assert catalog.refused == {
        "data": f"{data}/\\udcff.parquet has a name that is not UTF-8. Rename it.",
        "linked": f"{data}/linked/\\udcff.parquet has a name that is not UTF-8. Rename it.",
        "shard": f"{data}/shard/\\udcff.parquet has a name that is not UTF-8. Rename it.",
        "\\udcff": f"{data}/\\udcff has a name that is not UTF-8. Rename it.",
        "good.\\udcfe": f"{data}/good/\\udcfe has a name that is not UTF-8. Rename it.",
    }


@pytest.mark.parametrize("name", ["part-9.parquet", "penstock.toml"])
def test_pipe_and_device_are_refused(data: Path, open_all: Opener, name: str) -> None:
    for dataset in ("good", "pipe", "device", "later"):
        write_numbered(data / dataset, 9)
    os.mkfifo(data / "pipe" / name)
    (data / "device" / name).symlink_to("/dev/zero")
    os.mkfifo(data / name)
    (data / "mixture").mkdir()
    os.mkfifo(data / "mixture" / "penstock.toml")
    catalog = open_all()
    assert list(catalog.datasets) == ["good", "later"]
    assert catalog.refused.keys() == {"data", "pipe", "device", "mixture"}
    assert catalog.refused["pipe"] == f"{data}/pipe/{name} is a pipe, a socket or a device. Remove it."
    os.mkfifo(data / "later" / name)
    catalog.poll()
    assert "later" in catalog.datasets  # from its cache
    assert catalog["later"].error == f"{data}/later/{name} is a pipe, a socket or a device. Remove it."


def test_symlink_gives_a_dataset_a_second_name(data: Path, open_all: Opener) -> None:
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


@pytest.mark.parametrize(
    ("away", "number"), [(".", errno.ENOTCONN), ("team", errno.ENOTCONN), ("team/own", errno.ENOTCONN), ("team", errno.EMFILE)]
)
def test_datasets_below_a_folder_that_cannot_be_listed_are_served_on(
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
        errors = {name: catalog[name].error or "" for name in expected}
        assert {name: "cannot be read: " in error for name, error in errors.items()} == expected
        assert {name: os.strerror(number) in error for name, error in errors.items()} == expected
        assert catalog.plan("team.mixed", Spec(batch_size=1, seq_len=2)).schedule.num_steps == 6
        with pytest.raises(DatasetInvalid, match=os.strerror(number)):
            catalog.refresh("team.own")
    assert {name: served.snapshot.fingerprint for name, served in catalog.datasets.items()} == before
    catalog.refresh("team.own")
    assert catalog["team.own"].error is None


def test_unreachable_symlink_is_refused(data: Path, open_all: Opener) -> None:
    write_numbered(data / "other", 3)
    (data / "linked").symlink_to("x" * 300)  # longer than a name can be: asking what it is fails, as at a mount that died
    catalog = open_all()
    assert set(catalog.datasets) == {"other"}
    with pytest.raises(DatasetInvalid, match="linked is a broken symlink"):
        catalog["linked"]
    (data / "other" / "part-9.parquet").symlink_to("x" * 300)
    with pytest.raises(DatasetInvalid, match=r"part-9.parquet cannot be read: File name too long"):
        catalog.refresh("other")


def test_invalid_dataset_does_not_affect_others(data: Path, open_all: Opener) -> None:
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

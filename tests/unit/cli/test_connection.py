"""The address on a command line: a server, a dataset, or a URL as curl takes it."""

import pytest

from penstock import SpecError
from penstock.cli.connection import Address, parse_address, url
from penstock.wire.names import batches_path

HOST = "http://host:8000"
BATCHES = f"{HOST}/v1/datasets/wiki/epochs/2/ranks/3/batches"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HOST}/", Address(server=HOST)),
        (" host:8000/wiki\n", Address(server=HOST, dataset="wiki")),
        ("https://host/data/wiki", Address(server="https://host/data", dataset="wiki")),
        ("http://[::1]:80/a%20b", Address(server="http://[::1]:80", dataset="a b")),
        (f"{HOST}/wiki?seq_len=7&format=json", Address(server=HOST, dataset="wiki", query=(("seq_len", "7"),))),
        (f"{HOST}/v1/datasets", Address(server=HOST)),
        (f"{HOST}/v1/datasets/wiki/spec?seed=1", Address(server=HOST, dataset="wiki", query=(("seed", "1"),))),
        (f"{BATCHES}/41/provenance", Address(server=HOST, dataset="wiki", epoch=2, rank=3, step=41)),
        (
            f"{BATCHES}?start=8&stop=12&stride=2&world_size=4&format=json",
            Address(server=HOST, dataset="wiki", epoch=2, rank=3, step=8, query=(("world_size", "4"),)),
        ),
        (
            f"{HOST}/gate/v1/datasets/wiki/shuffle-report?epoch=5&format=json",
            Address(server=f"{HOST}/gate", dataset="wiki", epoch=5),
        ),
    ],
)
def test_parse_address_reads_servers_datasets_and_urls(text: str, expected: Address) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "ftp://host/wiki", "http://", "http://host:port/wiki", "http://host:99999/wiki", "host:0/wiki", "http://a..b/wiki",
        "http://\u201clocalhost\u201d:8000/wiki", "http://host:\uff18\uff10/wiki",
        "http:/host:8000/wiki", "http://http://host/wiki",
    ],
)  # fmt: skip
def test_parse_address_refuses_what_is_not_an_address(text: str) -> None:
    with pytest.raises(SpecError, match="is not an address"):
        parse_address(text)


@pytest.mark.parametrize("text", ["http://me:secret@host:8000/wiki", "me:secr/et@host", "me:secret@host/v1/datasets/wiki/spec"])
def test_parse_address_refuses_a_token_without_printing_it(text: str) -> None:
    with pytest.raises(SpecError, match="--token-file") as raised:
        parse_address(text)
    assert "secr" not in str(raised.value)


@pytest.mark.parametrize("rest", ["rows/3", "epochs/0/ranks/0", "epochs/x/ranks/0/batches/1", "batches"])
def test_parse_address_refuses_a_url_without_a_batch(rest: str) -> None:
    with pytest.raises(SpecError, match="shows no batch"):
        parse_address(f"{HOST}/v1/datasets/wiki/{rest}")


def test_url_of_a_batch_is_parsed_back() -> None:
    query = {"mix": "a:1,b:2@5", "split": "train"}
    written = url(HOST, f"{batches_path('a b/c', 1, 2)}/3", query)
    assert written == f"{HOST}/v1/datasets/a%20b%2Fc/epochs/1/ranks/2/batches/3?mix=a:1,b:2@5&split=train"
    assert parse_address(written) == Address(server=HOST, dataset="a b/c", epoch=1, rank=2, step=3, query=tuple(query.items()))

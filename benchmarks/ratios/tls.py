"""Bytes a second through RemoteDataset from a server with TLS, and from one without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import trustme

import data
from corpus import BATCH_SIZE, BATCH_TOKENS, SEQ_LEN
from penstock import RemoteDataset
from ratios import Ratio, Scale, in_turn, seconds
from servers import penstock

_TIMED_PASSES = 3


def measure(scale: Scale) -> list[Ratio]:
    parquet, cache = data.corpus(scale).parquet, data.warm_cache(scale)
    with TemporaryDirectory() as folder:
        authority, certificate = Path(folder) / "authority.pem", Path(folder) / "certificate.pem"
        issuer = trustme.CA()
        issuer.cert_pem.write_to_path(authority)
        issuer.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
        with penstock(parquet, cache, "--tls-cert", str(certificate)) as encrypted, penstock(parquet, cache) as plain:
            rates = [partial(_rate, server.address, authority) for server in (encrypted, plain)]
            ours, theirs = in_turn(scale.num_repeats, *rates)
    return [
        Ratio(what="bytes a second, with TLS", against="the same server without TLS", ours=ours, theirs=theirs, unit="B/s"),
    ]


def _rate(address: str, authority: Path) -> float:
    """Bytes of token ids a second, as they travel: two a token."""
    dataset = RemoteDataset(address, "tokens", batch_size=BATCH_SIZE, seq_len=SEQ_LEN, shuffle="global", ca=authority)

    def pull() -> None:
        for epoch in range(_TIMED_PASSES):
            dataset.set_epoch(epoch)
            for _ in dataset:
                pass

    return 2 * BATCH_TOKENS * len(dataset) * _TIMED_PASSES / seconds(pull)

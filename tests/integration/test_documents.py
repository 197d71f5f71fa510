"""The commands, URLs and snippets of README and docs, run as they stand, so that they cannot rot."""

from __future__ import annotations

import gzip
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from itertools import chain
from pathlib import Path

import httpx
import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.stats import Stats
from penstock_server.recipes import config
from penstock_server.recipes.config import read_recipe
from penstock_server.recipes.fields import is_messages
from penstock_server.recipes.transform import load_transform
from support.corpora import read_back, write, write_datatrove, write_indexed, write_text
from support.processes import Trainers, until
from support.row_files import write_litdata, write_mds
from support.servers import ROOT, Serve, Server, penstock
from support.stores import object_store

PAGES = {page: page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
IMPORT = "penstock import stories.jsonl.gz more.csv data/stories"
PREPARE = "penstock prepare data --tokenizer tokenizer.json"
AUDIT = "penstock audit run.ledger"
SERVE_HUB = "penstock serve data --tokenizer gpt2/tokenizer.json"
GUARD = [
    "export PENSTOCK_TOKENS=tokens.json",
    "penstock token create trainer --expires 90d",
    "penstock serve data --host 0.0.0.0",
]
COMPOSED = ("docker compose", "export PENSTOCK_TOKEN=$(docker compose")
SERVE_STORE = "penstock serve s3://my-bucket/corpus"
SHARE_STORE = f"{SERVE_STORE} --store s3://my-bucket/penstock"
FILL_STORE = SHARE_STORE.replace("serve", "prepare")
WORKERS = [f"{FILL_STORE}{flags}" for flags in (" --dry-run", " --index 0 --of 2", " --index 1 --of 2", "")]
IN_A_CLUSTER = ("docker build --target", "penstock token create trainer --tokens", "kubectl create secret", "helm install")
RUN_ELSEWHERE = ("make demo", "make test", *COMPOSED, *IN_A_CLUSTER)  # by .ci/run, tests/docker and tests/unit/test_helm.py


def blocks(language: str) -> list[str]:
    """The blocks of a language, without lines of tests, which run there."""
    fenced = re.compile(rf"(<!-- from .*? -->\n)?```{language}\n(.*?)```", re.DOTALL)
    return [block for text in PAGES.values() for source, block in fenced.findall(text) if not source]


def shell_lines() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return list(dict.fromkeys(lines))


def run(line: str, folder: Path) -> str:
    """What a command prints that runs in this folder. As in a shell, a pattern stands for the files that match it."""
    words = [sorted(path.name for path in folder.glob(word)) if "*" in word else [word] for word in shlex.split(line)[1:]]
    done = penstock(*chain.from_iterable(words), folder=folder)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    [line] = [line for line in shell_lines() if line.startswith("penstock sample")]
    run(line, folder)
    return folder / shlex.split(line)[-1]


@pytest.fixture(scope="module")
def server(sample: Path, serve: Serve) -> Server:
    assert f"penstock serve {sample.name}" in shell_lines()
    return serve(sample)


def here(text: str, server: Server) -> str:
    return text.replace("localhost:8000", server.url.removeprefix("http://"))


def test_documented_commands_are_all_tested() -> None:
    lines = shell_lines()
    curls = [line for line in lines if line.startswith("curl ")]
    assert len(curls) >= 3
    known = {
        ". .venv/bin/activate",
        "penstock sample sample-data",
        "penstock serve sample-data",
        "penstock serve --help",  # by test_command_line
        IMPORT,
        PREPARE,
        PREPARE.replace("prepare", "serve"),
        AUDIT,
        SERVE_HUB,
        SERVE_STORE,
        SHARE_STORE,
        *WORKERS,
        *GUARD,
        *curls,
        *asking(),
        *importing_ids(),
        *importing_folders(),
        *importing_objects(),
        *downloading(),
    }
    assert [line for line in lines if line not in known and not line.startswith(RUN_ELSEWHERE)] == []


def test_documented_address_of_an_object_store_is_served(sample: Path, serve: Serve) -> None:
    url = SERVE_STORE.split()[-1]
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = object_store(bucket)
    for path in sample.rglob("*"):
        if path.is_file():
            obstore.put(client, f"{prefix}/{path.relative_to(sample)}", path.read_bytes())
    far, near = ({each["name"] for each in serve(place).json("/v1/datasets")["datasets"]} for place in (url, sample))
    assert far == near == {"questions", "stories"}
    server = serve(*SHARE_STORE.split()[2:])
    server.get("/v1/datasets/stories/spec", packing="concat", seq_len=32, batch_size=2)  # counts tokens, which takes all blocks
    until(lambda: any(obstore.list(object_store(bucket), "penstock").collect()))


def test_documented_preparation_fills_the_store(sample: Path, tmp_path: Path) -> None:
    client = object_store("my-bucket")
    for path in sample.rglob("*.*"):
        obstore.put(client, f"corpus/{path.relative_to(sample)}", path.read_bytes())
    told = [run(line, tmp_path) for line in WORKERS]
    assert "stories: 24 row groups, 0 of them done; 7.7 MB of columns to read\n" in told[0]
    assert all("stories: prepared in s3://my-bucket/penstock: 24 row groups" in each for each in told[1:])


def test_documented_import_makes_a_dataset(sample: Path, serve: Serve, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "stories.jsonl.gz", "wt") as file:
        file.write('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "more.csv").write_text("text\nthree\n")
    shutil.copy(sample / "tokenizer.json", tmp_path)
    for line in (IMPORT, PREPARE):
        run(line, tmp_path)
    server = serve(tmp_path / "data", "--tokenizer", str(tmp_path / "tokenizer.json"))
    assert server.json("/v1/datasets/stories")["rows"] == 3


def test_documented_tokens_guard_a_server(sample: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, create, command = GUARD
    monkeypatch.setenv(*variable.removeprefix("export ").split("="))
    monkeypatch.chdir(tmp_path)
    token = penstock(*create.split()[1:], PENSTOCK_TOKENS="tokens.json", folder=tmp_path).stdout.strip()
    server = serve(sample, *command.split()[3:])
    assert server.get("/v1/datasets").status_code == 401
    assert httpx.get(f"{server.url}/v1/datasets", headers={"Authorization": f"Bearer {token}"}).status_code == 200


def importing_ids() -> list[str]:
    """The lines that import files of token ids."""
    return [line for line in shell_lines() if re.match(r"penstock import \S+\.(bin|ds) ", line)]


def test_documented_token_imports_make_documents(tmp_path: Path) -> None:
    write_indexed(tmp_path / "corpus_text_document.bin", [[[1, 2]], [[3]]])
    write_datatrove(tmp_path / "00000_shuffled.ds", [[4, 5], [6]])
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 4
    for name, ids in (("fineweb_0.bin", [50256, 1, 50256, 2]), ("fineweb_1.bin", [50256, 3, 3, 3])):
        (tmp_path / name).write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())
    np.array([1, 50256, 2, 3, 50256], "<u2").tofile(tmp_path / "train.bin")
    stream, rows = [[1, 50256, 2, 3, 50256]], []  # without a mark
    for line in sorted(importing_ids()):
        run(line, tmp_path)
        rows.append(read_back(tmp_path / line.split()[-2 - 2 * line.count("--") + 1])["tokens"].to_pylist())
    assert rows == [
        [[4, 5], [6]],
        [[1, 2], [3]],
        [[50256, 1], [50256, 2], [50256, 3, 3, 3]],
        stream,
        [[1, 50256], [2, 3, 50256]],
    ]


def importing_folders() -> list[str]:
    """The lines that import folders of MosaicML Streaming and LitData."""
    return [line for line in shell_lines() if re.match(r"penstock import (mds|litdata)/", line)]


def test_documented_folder_imports_make_datasets(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds" / "train", {"text": "str"}, [{"text": "one"}])
    write_mds(tmp_path / "mds" / "tokens", {"tokens": "bytes"}, [{"tokens": np.arange(3).tobytes()}])
    write_litdata(tmp_path / "litdata" / "train", ["no_header_tensor:18"], [np.arange(2)], item_loader="TokensLoader")
    rows = []
    for line in sorted(importing_folders()):
        run(line, tmp_path)
        rows += read_back(tmp_path / shlex.split(line)[3]).to_pylist()
    assert rows == [{"tokens": [0, 1]}, {"tokens": [0, 1, 2]}, {"text": "one"}]


def importing_objects() -> list[str]:
    """The lines that import from an object store."""
    return [line for line in shell_lines() if re.match(r"penstock import '?s3:", line)]


def test_documented_imports_from_a_store_make_datasets(tmp_path: Path) -> None:
    client = object_store("my-bucket")
    for path in write_mds(tmp_path / "mds", {"text": "str"}, [{"text": "one"}]).iterdir():
        obstore.put(client, f"mds/train/{path.name}", path.read_bytes())
    obstore.put(client, "raw/x.jsonl.zst", bytes(pa.compress(b'{"text": "two"}\n', "zstd", asbytes=True)))
    (tmp_path / "more.csv").write_text("text\nthree\n")
    into_store, into_folder = importing_objects()
    done = [penstock(*shlex.split(line)[1:], folder=tmp_path) for line in (into_store, into_folder)]
    assert [each.stderr for each in done] == ["", ""]
    assert read_back(tmp_path / "data" / "raw").to_pylist() == [{"text": "two"}, {"text": "three"}]
    [written] = obstore.list(client, "shards/web").collect()
    assert written["path"] == "shards/web/part-00000.parquet"
    obstore.delete(client, written["path"])  # the store may outlive this test


def downloading() -> list[str]:
    """The lines that download from Hugging Face's hub."""
    return [line for line in shell_lines() if line.startswith("hf download ")]


def test_documented_hub_download_is_served(sample: Path, serve: Serve, tmp_path: Path) -> None:
    """Its files are made here; where they land is read off the lines."""
    data, tokenizer = map(shlex.split, downloading())
    folder = tmp_path / data[data.index("--local-dir") + 1] / "data"
    write_text(folder, ["one", "two"])
    (folder / "part-000.parquet").rename(folder / "train-00000-of-00001-2d5a1467fff1081b.parquet")
    (folder.parent / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / tokenizer[-1]).mkdir()
    shutil.copy(sample / "tokenizer.json", tmp_path / tokenizer[-1])
    _, _, served, *flags = SERVE_HUB.split()
    server = serve(tmp_path / served, flags[0], str(tmp_path / flags[1]))
    assert [one["name"] for one in server.json("/v1/datasets")["datasets"]] == ["stories.data"]
    assert "here as `stories.data`" in PAGES[ROOT / "docs/guides/your-data.md"]


def asking() -> list[str]:
    """The lines that ask a server."""
    return [
        line
        for line in shell_lines()
        if line.startswith(("penstock peek", "penstock plan", "penstock bench", "penstock doctor"))
    ]


@pytest.mark.slow
def test_documented_client_commands_succeed(server: Server) -> None:
    assert len(asking()) == 5
    shown = []
    for line in asking():
        name, *arguments = shlex.split(here(line, server))[1:]
        quick = ["--seconds", "0.5"] if name == "bench" else []
        done = penstock(name, *arguments, *quick, COLUMNS="100")
        assert done.returncode == 0, f"{line}\n{done.stderr}{done.stdout}"
        shown.append(done.stdout)
    [table] = [block.splitlines() for block in blocks("text") if "tokens   pad" in block]
    printed = [line.rstrip() for line in shown[0].splitlines()]
    assert table[1:] == printed[1 : len(table)]  # the first line names the snapshot of the files as written here


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_documented_curl_lines_succeed(server: Server) -> None:
    lines = [line for line in shell_lines() if line.startswith("curl ")]
    lines += re.findall(r"^ +(curl .*)$", server.greeting, re.MULTILINE)
    for line in lines:
        done = subprocess.run(["bash", "-c", here(line, server) + " --fail -sS"], capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr}{done.stdout}"
        assert done.stdout.startswith("{")


@pytest.mark.slow
def test_documented_python_runs_and_its_ledger_is_proven(serve: Serve, tmp_path: Path) -> None:
    run("penstock sample small --rows 6400", tmp_path)
    server = serve(tmp_path / "small")
    with Trainers(tmp_path) as trainers:
        for snippet in blocks("python"):
            status, _, errors = trainers.run(f"import os\nos.chdir({str(tmp_path)!r})\n{here(snippet, server)}").end()
            assert status == 0, f"{snippet}\n{errors}"
    assert run(AUDIT, tmp_path).startswith("PROVEN: each sample that was due, 6,400 in 1 epoch, was trained on exactly once\n")


def test_documented_recipe_is_valid(sample: Path, tmp_path: Path) -> None:
    *_, short, toml = sorted(set(blocks("toml")), key=len)
    assert toml.startswith(short)
    folder = write(tmp_path / "pairs", toml, {"question": ["?"], "answer": ["!"]})
    schema = pq.read_schema(folder / "part-0.parquet")
    shutil.copy(sample / "tokenizer.json", tmp_path)
    recipe = read_recipe(folder, schema, None)
    optional = tomllib.loads("\n".join(line.removeprefix("# ") for line in toml.splitlines() if line.startswith("# ")))
    assert set(optional) > {"eos", "bos", "columns", "filter", "validation", "split_by", "on_bad_row"}
    (folder / "penstock.toml").write_text(toml.replace("\n# ", "\n"))
    assert read_recipe(folder, schema, None).on_bad_row == "replace"
    assert (recipe.token_columns, recipe.eos_id, recipe.pad_id, recipe.on_bad_row) == (("question", "answer"), 0, 1, "fail")


def test_documented_transform_works(sample: Path, serve: Serve, tmp_path: Path) -> None:
    code, _ = [block for block in blocks("python") if "def function" in block]
    folder = write(tmp_path / "pages", 'transform = "clean:function"', {"body": ["  one\r\ntwo \n"]})
    (folder / "clean.py").write_text(code)
    server = serve(tmp_path, "--tokenizer", str(sample / "tokenizer.json"), "--allow-transforms")
    assert server.json("/v1/datasets/pages/rows/0")["text"].removesuffix("<|endoftext|>") == "one\ntwo"


def test_documented_sharegpt_transform_makes_messages(tmp_path: Path) -> None:
    _, code = [block for block in blocks("python") if "def function" in block]
    (tmp_path / "clean.py").write_text(code)
    chats = [[{"from": "human", "value": "fox"}, {"from": "gpt", "value": "dog"}], []]
    conversations = pa.RecordBatch.from_pydict({"conversations": chats})

    made = load_transform("clean:function", tmp_path)(conversations)

    assert is_messages(made.schema.field("messages").type)
    assert made["messages"].to_pylist() == [
        [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}], []
    ]  # fmt: skip
    assert load_transform("clean:function", tmp_path)(conversations[:0]).schema == made.schema


def test_documentation_links_exist() -> None:
    for page, text in PAGES.items():
        for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
            target = (page.parent / link).resolve() if link else page
            assert target.exists(), link
            if anchor:
                headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                assert anchor in [re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_architecture_names_existing_files() -> None:
    known = [path for folder in ("client", "server", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.*")]
    for name in set(re.findall(r"`([\w/]+\.(?:py|md))`", (ROOT / "ARCHITECTURE.md").read_text())):
        assert any(path.match(name) for path in known), name


def test_reference_pages_are_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "docs/generate.py", "--check"], check=True)


def test_documentation_lists_every_recipe_key() -> None:
    for key in config._KEYS:
        assert re.search(rf"\b{key} = |`{key}`", PAGES[ROOT / "docs/reference/penstock-toml.md"]), key


def test_documentation_lists_every_statistic() -> None:
    for name in (field.name for field in fields(Stats)):
        assert re.search(rf"^ *{name} ", str(Stats.__doc__), re.MULTILINE), name  # Python 3.13 takes the indentation away
        assert f"`{name}`" in PAGES[ROOT / "docs/guides/many-ranks.md"], name


def test_documentation_names_existing_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^)make ([a-z-]+)", "".join(PAGES.values()), re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

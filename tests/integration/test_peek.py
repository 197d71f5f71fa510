"""`penstock peek` against a real server: it shows what the trainer gets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import unicodedata
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len
from tokenizers import Tokenizer

from penstock import RemoteDataset, Spec
from penstock.cli.batch_view import SampleView, view
from penstock.cli.connection import get_json
from penstock.servers import Servers
from penstock.text import counted
from penstock.transport import Transport
from penstock.wire.names import batches_path
from support.chat_templates import CHATML
from support.corpora import write, write_numbered, write_pairs, write_text, write_tokenizer
from support.servers import Serve, Server, penstock, penstock_in_terminal

NUM_ROWS = 40
CHINESE = "春天来了、万物复苏。小鸟在树上唱歌、孩子们在公园里放风筝、老人们坐在长椅上晒太阳。" * 3
NASTY = "a \x1b[31mred\x1b]0;title\x07 \x9b2J bell\r\nb\ttab \u202e \x00"


def chat(row: int) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": f"how many foxes, {row}?"}, {"role": "assistant", "content": f"{row} foxes"}]
    return turns * (1 + row % 4)


@pytest.fixture(scope="module")
def data_dir(shared: Path) -> Path:
    tokenizer = {"tokenizer_config.json": json.dumps({"chat_template": CHATML})}
    (shared / "tokenizer_config.json").write_text(tokenizer["tokenizer_config.json"])
    write_tokenizer(shared / "tokenizer.json")
    write_text(
        shared / "texts", [CHINESE, NASTY, "the quick fox", "e\u0301 👩\u200d👧 ❤\ufe0f 한국어 " * 9] * 10, row_group_size=7
    )
    write_pairs(shared / "pairs", [(f"how many foxes jump, {n}?" * (1 + n % 5), f" {n} foxes") for n in range(NUM_ROWS)])
    write_numbered(shared / "numbers", 200)
    tables: dict[str, dict[str, Any]] = {
        "chats": {"messages": [chat(n) for n in range(NUM_ROWS)]},
        "prefs": {
            "prompt": [f"how many, {n}?" for n in range(NUM_ROWS)],
            "chosen": [f" {n}" for n in range(NUM_ROWS)],
            "rejected": [" no dogs"] * NUM_ROWS,
        },
        "labelled": {
            "input_ids": [[n, 7, 8, 9] for n in range(NUM_ROWS)],
            "labels": [[-100, 7, 8, 9] if n % 2 else [n, -100, 8, -100] for n in range(NUM_ROWS)],
        },
        "answers": {"prompt": [[n, 5] for n in range(NUM_ROWS)], "response": [[n, 6, 6] for n in range(NUM_ROWS)]},
        "id-prefs": {"chosen": [[n, 5] for n in range(NUM_ROWS)], "rejected": [[n] for n in range(NUM_ROWS)]},
    }
    for name, table in tables.items():
        write(shared / name, "", table, row_group_size=9)
    write(shared / "both", 'mix = "texts:1,pairs:1"')
    return shared


@pytest.fixture(scope="module")
def server(serve: Serve, data_dir: Path) -> Server:
    return serve(data_dir, "--tokenizer", str(data_dir / "tokenizer.json"))


def views(server: Server, dataset: str, step: int, **spec: Any) -> list[SampleView]:
    path = f"{batches_path(dataset, 0, 0)}/{step}"
    query = {name: str(value) for name, value in spec.items()}
    with closing(Transport(Servers((server.url,)), retry_seconds=5)) as transport:
        return view(get_json(transport, path, {**query, "format": "json"}), get_json(transport, f"{path}/provenance", query))


PACKED = {"packing": "best_fit", "seq_len": 120}
SPECS: list[tuple[str, dict[str, Any]]] = [
    ("texts", {}),
    ("texts", {"packing": "concat", "seq_len": 90}),
    ("pairs", {"pad": "longest"}),
    ("pairs", {"seq_len": 16}),
    ("pairs", {"overflow": "split", "seq_len": 16}),
    ("pairs", {"packing": "concat", "seq_len": 90, "mark_documents": True, "loss_on": "all"}),
    ("pairs", PACKED),
    ("pairs", {"task": "seq2seq", "target_seq_len": 32}),
    ("chats", {}),
    ("chats", PACKED),
    ("prefs", {"seq_len": 32}),
    ("numbers", PACKED),
    ("both", {}),
    ("labelled", {}),
    ("labelled", PACKED),
    ("answers", {"task": "seq2seq", "target_seq_len": 32}),
    ("id-prefs", {}),
]


@pytest.mark.filterwarnings("ignore:no token has loss in the first batch")  # of 16 tokens a pair has only its prompt
@pytest.mark.filterwarnings("ignore:.* tokens of a batch's (prompts|responses) are padding")
@pytest.mark.parametrize(("dataset", "spec"), SPECS, ids=str)
def test_view_has_the_trainers_tokens_padding_and_loss(server: Server, dataset: str, spec: dict[str, Any]) -> None:
    batch_size = 2
    data = RemoteDataset(server.url, dataset, rank=0, world_size=1, batch_size=batch_size, **spec)
    for step, batch in zip(range(3), data, strict=False):
        for index, shown in enumerate(views(server, dataset, step, batch_size=batch_size, **spec)):
            labels = [batch[f"{side}labels"][index] for side in ("", "chosen_", "rejected_") if f"{side}labels" in batch]
            masks = [batch[f"{side}attention_mask"][index] for side in ("", "chosen_", "rejected_") if f"{side}labels" in batch]
            if spec.get("task") == "seq2seq":
                masks.append(batch["labels"][index] != -100)
            assert shown.num_loss_tokens == sum(int((line != -100).sum()) for line in labels)
            assert shown.num_tokens == sum(int(mask.sum()) for mask in masks)
            assert sum(line.num_positions for line in shown.lines) == sum(mask.numel() for mask in masks)
            assert sum(passage.num_tokens for passage in shown.passages) == shown.num_tokens
            if len(masks) == 1:
                in_loss = [
                    piece.in_loss for passage in shown.passages for piece in passage.pieces for _ in range(piece.num_tokens)
                ]
                taken = (labels[0] != -100).tolist()
                starts = (
                    {0} if "position_ids" not in batch else {i for i, at in enumerate(batch["position_ids"][index]) if at == 0}
                )
                assert all(in_loss[i] == taken[i] for i in range(len(in_loss)) if i not in starts)


@pytest.mark.parametrize("spec", [{}, PACKED, {"packing": "concat", "seq_len": 90}], ids=str)
def test_passage_names_the_row_of_its_text(server: Server, data_dir: Path, spec: dict[str, Any]) -> None:
    rows = pq.read_table(data_dir / "pairs" / "part-000.parquet").to_pylist()
    seen = 0
    for step in range(4):
        for sample in views(server, "pairs", step, batch_size=2, **spec):
            for passage in sample.passages:
                [(row, start)] = re.findall(r"^part-000.parquet, row group 0, row (\d+)(, from token \d+)?$", passage.source)
                whole = rows[int(row)]["prompt"] + rows[int(row)]["response"] + "<|endoftext|>"
                text = "".join(piece.text for piece in passage.pieces)
                assert text in whole if start else whole.startswith(text)
                seen += 1
    assert seen >= 8


def test_peek_shows_a_batch_and_the_curl_command_for_it(server: Server, tmp_path: Path) -> None:
    done = penstock("peek", f"{server.url}/pairs?seq_len=64", "--step", "3", "--batch-size", "2", "--seed", "5")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    snapshot = server.json("/v1/datasets/pairs")["snapshot"]
    assert lines[0] == f"pairs  epoch 0, rank 0, step 3  snapshot {snapshot}"
    page = server.json("/v1/datasets/pairs/epochs/0/ranks/0/batches/3?seq_len=64&batch_size=2&seed=5&format=json")
    for sample in page["samples"]:
        [cells] = [line.split()[:4] for line in lines if line.rstrip().endswith(sample["source"])]
        in_loss = sample["num_tokens"] - sample["prompt_lengths"]
        padding = f"{1 - sample['num_tokens'] / 64:.0%}"
        assert cells == [str(sample["index"]), str(sample["num_tokens"]), padding, str(in_loss)]
    assert f"{page['nbytes']:,} bytes" in done.stdout
    assert lines[-1].startswith("curl '")
    if shutil.which("curl"):
        fetched = subprocess.run(["bash", "-c", f"{lines[-1]} --fail -sS"], capture_output=True, text=True, check=True)
        assert json.loads(fetched.stdout)["digest"] == page["digest"]


def test_peek_reports_tokens_cut_off_rows(server: Server) -> None:
    def said(*options: str) -> str:
        return " ".join(
            penstock("peek", f"{server.url}/texts", "--batch-size", "8", "--seq-len", "16", *options).stdout.split()
        )

    cut, whole = (views(server, "texts", 0, batch_size=8, seq_len=seq_len) for seq_len in (16, 4096))
    lost = [b.num_tokens - a.num_tokens for a, b in zip(cut, whole, strict=True)]
    num_cut_of = [[view.lines[0].num_cut for view in views] for views in (cut, whole)]
    assert num_cut_of == [lost, [0] * len(whole)]
    num_cut = sum(map(bool, lost))
    told = f"seq_len cuts {sum(lost):,} tokens off {num_cut} of 8 rows, and no batch holds them: "
    told += "--overflow split, --packing best_fit or concat keeps them"
    assert told in said()
    for options in (("--overflow", "split"), ("--packing", "best_fit"), ("--packing", "concat")):
        assert "no batch holds" not in said(*options)


def test_peek_reports_tokens_cut_off_prompts_and_responses(server: Server) -> None:
    url = f"{server.url}/pairs?task=seq2seq&batch_size=8"
    rows = server.json("/v1/datasets/pairs/epochs/0/ranks/0/batches/0/provenance?batch_size=8")["samples"]
    prompts = [row["sources"][0]["prompt_tokens"] for row in rows]
    responses = [row["sources"][0]["row_tokens"] - prompt for row, prompt in zip(rows, prompts, strict=True)]
    seq_len, target_seq_len = max(prompts) - 1, max(responses) - 2
    said = " ".join(penstock("peek", url, "--seq-len", str(seq_len), "--target-seq-len", str(target_seq_len)).stdout.split())
    for noun, limit, longest, lengths in (
        ("prompts", "seq_len", seq_len, prompts),
        ("responses", "target_seq_len", target_seq_len, responses),
    ):
        lost = [length - longest for length in lengths if length > longest]
        assert f"{limit} cuts {counted(sum(lost), 'token')} off {len(lost)} of 8 {noun}, and no batch holds them" in said
    assert "best_fit" not in said
    whole = penstock("peek", url, "--seq-len", str(max(prompts)), "--target-seq-len", str(max(responses))).stdout
    assert "no batch holds" not in whole


def test_peek_reports_tokens_cut_off_sides_of_pairs(server: Server) -> None:
    whole = server.json("/v1/datasets/prefs/epochs/0/ranks/0/batches/0?batch_size=8&format=json")["samples"]
    lengths = [len(pair[f"{side}_input_ids"]) for pair in whole for side in ("chosen", "rejected")]
    longest = sorted(lengths)[len(lengths) // 2] - 1
    lost = [length - longest for length in lengths if length > longest]
    said = " ".join(penstock("peek", f"{server.url}/prefs", "--batch-size", "8", "--seq-len", str(longest)).stdout.split())
    assert f"seq_len cuts {counted(sum(lost), 'token')} off {len(lost)} of 16 sides, and no batch holds them" in said


def test_peek_takes_a_batchs_url_and_options_override_it(server: Server) -> None:
    url = f"{server.url}/v1/datasets/numbers/epochs/2/ranks/1/batches?start=4&stop=9&batch_size=3&world_size=2&format=msgpack"
    assert penstock("peek", url).stdout.startswith("numbers  epoch 2, rank 1 of 2, step 4 ")
    told = penstock("peek", url, "--step", "0", "--epoch", "0", "--batch-size", "1").stdout
    assert told.startswith("numbers  epoch 0, rank 1 of 2, step 0 ")
    assert len(re.findall(r"row group", told)) == 1


def test_peek_has_an_option_for_every_parameter() -> None:
    offered = set(re.findall(r"^  --([a-z-]+)", penstock("peek", "--help", COLUMNS="200").stdout, re.MULTILINE))
    assert offered - {"step", "epoch", "rank", "lines", "token-file", "ca", "cert"} == {
        field.name.replace("_", "-") for field in fields(Spec)
    }


def test_peek_escapes_control_characters(server: Server) -> None:
    for shuffle in ("none", "window"):
        status, shown = penstock_in_terminal(80, "peek", f"{server.url}/texts", "--shuffle", shuffle, NO_COLOR="1")
        assert status == 0
        assert not {c for c in shown if unicodedata.category(c) in ("Cc", "Cs")} - {"\r", "\n"}
        assert "a ␛[31mred␛]0;title␇ <U+009B>2J bell␍↵" in shown


def test_peek_uses_colours_only_on_terminals_without_no_color(server: Server) -> None:
    arguments = ("peek", f"{server.url}/pairs", "--batch-size", "2")
    _, coloured = penstock_in_terminal(200, *arguments)
    assert re.search(r"\x1b\[2mhow many foxes.*\x1b\[0m \d+ foxes<", coloured)
    assert "dimmed: without loss" in coloured
    for _, plain in (
        penstock_in_terminal(200, *arguments, NO_COLOR="1"),
        penstock_in_terminal(200, *arguments, TERM="dumb"),
        (0, penstock(*arguments, COLUMNS="200").stdout),
    ):
        assert "\x1b" not in plain
        assert re.search(r"⟦how many foxes[^⟧]*⟧\s+\d+\s+foxes<", plain)


@pytest.mark.parametrize("columns", [44, 132])
def test_table_fits_the_terminal_with_wide_characters(server: Server, columns: int) -> None:
    _, shown = penstock_in_terminal(
        columns, "peek", f"{server.url}/texts", "--batch-size", "12", "--shuffle", "none", NO_COLOR="1"
    )
    rows = shown.split("\r\n\r\n")[1].split("\r\n")
    widths = [cell_len(line) for line in rows]
    assert columns - 4 < max(widths) <= columns
    assert all(line.startswith(" " * 21) for line in rows[2:] if "part-" not in line)
    assert "春天来了、万物" in re.sub(r"\s", "", shown)


def test_long_prompt_does_not_hide_the_response(serve: Serve, tmp_path: Path, data_dir: Path) -> None:
    write_pairs(tmp_path / "data" / "long", [("fox " * 900 + "end of it?", " the dog jumps")])
    server = serve(tmp_path / "data", "--tokenizer", str(data_dir / "tokenizer.json"))
    arguments = ("peek", f"{server.url}/long", "--batch-size", "1", "--seq-len", "8192")
    short, whole = penstock(*arguments).stdout, penstock(*arguments, "--lines", "0").stdout
    assert len(short.splitlines()) <= 16
    assert "end of it?⟧ the dog jumps<|endoftext|>" in " ".join(short.split())
    [left_out] = re.findall(r"\[… ([\d,]+) characters …\]", short)
    assert short.count("fox") * 4 + int(left_out.replace(",", "")) == pytest.approx(3600, abs=8)
    assert whole.count("fox") == 900
    cut = penstock("peek", f"{server.url}/long", "--batch-size", "1", "--seq-len", "64").stdout
    assert "no token has loss in sample 0: does the prompt fill seq_len?" in cut


def test_peek_limits_the_rows_of_a_sample(server: Server) -> None:
    arguments = ("peek", f"{server.url}/numbers", "--packing", "concat", "--seq-len", "200", "--batch-size", "1")
    shown = penstock(*arguments).stdout
    assert shown.count("▸ part-") == 4
    [more] = re.findall(r"▸ and (\d+) more", shown)
    assert penstock(*arguments, "--lines", "0").stdout.count("▸ part-") == 4 + int(more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["{url}"],
            "which dataset? {url} has answers, chats, id-prefs, labelled, numbers, pairs, prefs, texts, both. Add one to",
        ),
        (["{url}/pears"], "there is no dataset 'pears'. Did you mean 'pairs'?"),
        (["{url}/pairs", "--step", "9999"], "step 9999 does not exist"),
        (["{url}/pairs", "--rank", "2"], "rank 2 does not exist"),
        (["{url}/pairs", "--batch-size", "none"], "batch_size must be a whole number from 1"),
        (["{url}/pairs?sead=3"], "'sead' is not a parameter of a batch. Did you mean 'seed'?"),
        (["{url}/pairs", "--packing", "concat", "--task", "seq2seq"], "task=seq2seq needs packing=rows: with"),
        (["{url}/v1/datasets/pairs/rows/1"], "shows no batch"),
        (["ftp://host/pairs"], "is not an address"),
        (["http://127.0.0.1:9/pairs"], "does not answer: [Errno 111] Connection refused. Start a server there"),
        (["https://{host}/pairs"], "https://{host} does not speak TLS: is http://{host} meant?"),
        (["{url}/gate/pairs"], "answers /healthz with status 404, but not as a penstock server does"),
    ],
)
def test_peek_fails_with_one_line_and_status_2(server: Server, arguments: list[str], message: str) -> None:
    names = {"url": server.url, "host": server.url.removeprefix("http://")}
    done = penstock("peek", *(argument.format(**names) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert message.format(**names) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_peek_into_a_closed_pipe_is_not_an_error(server: Server) -> None:
    peek = f"{sys.executable} -m penstock peek {server.url}/numbers --batch-size 150 --lines 0"
    for reader in ("head -1 >/dev/null", "true"):
        command = f"{peek} | ({reader}); echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("0\n", "")


def test_token_ids_without_loss_are_marked(server: Server) -> None:
    shown = penstock("peek", f"{server.url}/labelled", "--batch-size", "2", "--shuffle", "none").stdout
    assert re.search(r" 0⟦7⟧8⟦9⟧ *\n", shown)
    assert re.search(r" ⟦1⟧7 8 9 *\n", shown)


def test_text_is_the_decoded_token_ids(server: Server, data_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(data_dir / "tokenizer.json"))
    [frame] = server.frames("/v1/datasets/chats/epochs/0/ranks/0/batches/0", batch_size=4)
    for ids, length, shown in zip(
        frame.tensors["input_ids"], frame.tensors["lengths"], views(server, "chats", 0, batch_size=4), strict=True
    ):
        text = "".join(piece.text for passage in shown.passages for piece in passage.pieces)
        assert text == tokenizer.decode(ids[:length].tolist(), skip_special_tokens=False)

"""Plans of documents: the tables are those of the stored files, each of which is of its command."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import common, gpu_plans, plan_tables, tpu_plans
from benchmarks.plan_tables import PagePlan, PlanTable
from benchmarks.step import PEERS
from bert_jax.command import UserError
from bert_jax.planning.gpu_chips import GPUS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    pytest.param(ROOT / "docs" / "tpu_plan.md", RESULTS / "tpu_plans", [tpu_plans.TABLE], id="tpu"),
    pytest.param(ROOT / "docs" / "gpu_plan.md", RESULTS / "gpu_plans", gpu_plans.TABLES, id="gpu"),
]


@pytest.mark.parametrize(("page", "folder", "tables"), PAGES)
def test_the_tables_of_the_page_are_those_of_the_stored_plans(page, folder, tables, tmp_path):
    written = tmp_path / page.name
    text = page.read_text(encoding="utf-8")
    assert all(text.count(table.begin) == 1 for table in tables)
    written.write_text(text.replace(" GiB |", " |"), encoding="utf-8")
    plan_tables.write(tables, folder, written)
    assert written.read_text(encoding="utf-8") == text, "write the tables with --page"


@pytest.mark.parametrize(("page", "folder", "tables"), PAGES)
def test_each_stored_plan_is_of_its_command(page, folder, tables):
    plans = {plan.name: plan for table in tables for plan in table.plans}
    files = {file.stem: file for file in folder.iterdir()}
    assert files.keys() <= plans.keys()
    for name, file in files.items():
        given, found = options(plans[name]), json.loads(file.read_text(encoding="utf-8"))
        assert found["topology"] == given["topology"] and found["slices"] == int(given.get("slices", 1)), name
        assert found["batch_size"] == int(given["config.batch_size"]), name
        assert found["rows"]["seq_len"] == int(given["seq_len"]), name
        assert (found["rows"]["pack"] > 1) == ("config.data.train" in given), name
        assert given.get("config.model.attention", "auto") in ("auto", *found["attention"]), name
        for key, value in given.items():
            section, _, field = key.rpartition(".")
            if section == "config.model" and field in found["model"]:
                assert found["model"][field] == float(value), (name, key)
            if section == "config.mesh" and field in found["mesh"]:
                assert found["mesh"][field] == int(value), (name, key)


def options(plan: PagePlan) -> dict[str, str]:
    """The flags of a plan's command, by name; each is --name=value or --name value."""
    words = iter(plan.arguments)
    flags = {}
    for word in words:
        name, equals, value = word.partition("=")
        flags[name.removeprefix("--")] = value if equals else next(words)
    return flags


def test_no_row_of_the_gpu_page_lacks_its_plan():
    plans = [plan for table in gpu_plans.TABLES for plan in table.plans]
    assert {plan.name for plan in plans} == {file.stem for file in (RESULTS / "gpu_plans").iterdir()}
    for plan in plans:
        given = options(plan)
        gpus = int(given["topology"].partition(":")[2])
        assert int(given["config.batch_size"]) * int(given["seq_len"]) == gpu_plans.TOKENS * gpus


def test_a_row_has_the_figures_of_its_plan():
    """Two GPUs, each of which computes 39.5 TFLOP of the model in 0.1 s, half of 790 TFLOP/s."""
    found = {
        "devices": 2,
        "batch_size": 4096,
        "fits": True,
        "memory_bytes": {"total": 3 * 2**29},
        "flops": {"model": 79e12},
        "step_seconds": 0.1,
        "mfu": 39.5e12 / 0.1 / GPUS["h100"].peak_flops,
        "mfu_at_most": 0.751,
        "roofline": {"traffic": 12.34e9},
        "tokens_per_second": 5_242_880.4,
        "attention": ["cudnn", "banded"],
        "model": {"attention_dropout": 0.0},
        "rows": {"seq_len": 1024},
    }
    step = "2 | 4,096 | 1.5 GiB | 100.0 ms | 39.9%"
    plan = PagePlan("name", "title", ())
    base = " | ".join(gpu_plans.BASE.cells(plan, found))
    assert base == f"1,024 | cuDNN, banded, no dropout there | {step} | 50.0% | 75% | 12.3 GB | 5,242,880"
    assert base.count("|") + 1 == len(gpu_plans.BASE.columns)
    other = " | ".join(gpu_plans.OTHERS.cells(plan, found))
    assert other == f"title | 1,024 | {step} | 12.3 GB | cuDNN, banded | 5,242,880"
    assert other.count("|") + 1 == len(gpu_plans.OTHERS.columns)
    assert "1.5 GiB, does not fit" in gpu_plans.OTHERS.cells(plan, found | {"fits": False})


def test_a_measured_row_has_the_figures_beside_torch_compile(tmp_path, monkeypatch):
    settings = {"seq_len": 128, "batch_size": 256, "attention": ["einsum"], "attention_dropout": 0.1, "xla_flags": ""}

    def line(peer, ratio, value, **changes):
        found = {"seconds": [[value / 1e6, value / 1e6], [9.0]], "peak_memory_gb": 15.84} | settings | changes
        peer = peer and f"{PEERS[peer]}, torch, bfloat16"
        return {"name": "training step, base, GPU", "value": value, "peer": peer, "ratio": ratio, "settings": found}

    lines = [
        line("equal_compiled", 0.974, 51_000),
        line("equal", 1.288, 52_000),
        line("full", 1.8, 53_000),
        line(None, None, 54_000, xla_flags="--xla_some=true"),
        line("equal_compiled", 2.0, 55_000, attention=["triton"]),
        line("equal_compiled", 3.0, 56_000) | {"name": "training step, large, GPU"},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, reversed(lines))))
    monkeypatch.setattr(gpu_plans, "MEASURED", tmp_path / "lines.jsonl")
    found = {
        "rows": {"seq_len": 128},
        "batch_size": 256,
        "attention": ["einsum"],
        "model": {"layers": 12, "attention_dropout": 0.1},
        "step_seconds": 0.0463,
        "memory_bytes": {"total": 15.7e9},
    }
    cells = gpu_plans.H200.cells(PagePlan("name", "title", ()), found)
    assert " | ".join(cells[:6]) == "title | 128 | 256 | einsum | 0.1 | 51.0 ms"
    assert " | ".join(cells[6:]) == "46.3 ms | 15.8 GB | 15.7 GB | 51 k | 0.97 | 1.29"
    assert len(cells) == len(gpu_plans.H200.columns)


@pytest.fixture
def commands(monkeypatch):
    """The commands of plans that ran, in place of which only a file with their number is written."""
    run, found = subprocess.run, []

    def fake(line, **options):
        if line[0] == "git":
            return run(line, **options)
        found.append(line[1:-1])
        Path(line[-1]).write_text(json.dumps({"number": len(found)}), encoding="utf-8")

    monkeypatch.setattr(subprocess, "run", fake)
    return found


def test_plans_without_a_file_are_made_with_their_commands(commands, tmp_path, capsys):
    plans = (
        PagePlan("a_kept", "", ("--seq_len=1",)),
        PagePlan("a_shards", "", ("--config.data.train=SHARDS",)),
        PagePlan("a_plain", "", ("--seq_len=2",)),
        PagePlan("b", "", ("--seq_len=3",)),
    )
    table = PlanTable("", ("name", "number"), lambda plan, found: [plan.name, str(found["number"])], plans)
    folder, shards = tmp_path / "plans", tmp_path / "shards"
    folder.mkdir()
    (folder / "a_kept.json").write_text('{"number": 7}', encoding="utf-8")
    flags = plan_tables.parser("benchmarks.plans", "").parse_args([f"--plans={folder}", "--only=a"])
    with pytest.raises(UserError, match="a_shards reads shards; name their folder with --shards"):
        plan_tables.update([table], flags)
    flags.only = "c,a"
    with pytest.raises(UserError, match="--only is c,a, with which no plan begins; choose from a_kept, a_shards"):
        plan_tables.update([table], flags, shards)
    flags.only = "a"
    plan_tables.update([table], flags, shards)
    command = ["-m", "bert_jax", "plan"]
    assert commands == [
        [*command, f"--config.data.train={shards}", "--json"],
        [*command, "--seq_len=2", "--json"],
    ]
    rows = ["| name | number |", "|---|---|", "| a_kept | 7 |", "| a_shards | 1 |", "| a_plain | 2 |", ""]
    assert capsys.readouterr().out.splitlines() == [*rows, *(plan.line for plan in plans)]
    made = (folder / "a_shards.json").read_text(encoding="utf-8")
    assert json.loads(made)["versions"]["jax"] and json.loads(made)["commit"] == common.commit()
    assert str(tmp_path) not in made

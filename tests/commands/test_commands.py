"""The command bert-jax, and recipes by name."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bert_jax import config
from bert_jax.commands import keys, main, recipes
from bert_jax.config import FinetuneConfig, PretrainConfig, options
from bert_jax.config.loading import recipe_file, shipped_recipes
from bert_jax.errors import UserError
from website import reference
from website.links import without_relative_links

ROOT = Path(__file__).parent.parent.parent


def bert_jax(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    """`python -m bert_jax` with these arguments, run in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "bert_jax", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def test_every_module_with_a_main_is_a_command_and_no_other():
    mains = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in [*(ROOT / "bert_jax").rglob("*.py"), *(ROOT / "data_prep").glob("*.py")]
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(path.read_text()).body)
    }
    assert {*main.MODULES.values(), "bert_jax.commands.main"} == mains


def test_commands_have_one_spelling():
    """No text that is not a document of docs/ tells a user to run a module of the packages."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for path in map(ROOT.joinpath, files):
        if path.is_file() and not path.is_relative_to(ROOT / "docs") and path.suffix in (".py", ".md", ".json", ""):
            module = re.search(r"python -m (?:bert_jax|data_prep)\.\w+", path.read_text(encoding="utf-8"))
            assert module is None or path.name == "CHANGELOG.md", f"{path} has {module}; write bert-jax NAME"


def test_commands_are_listed_by_job_and_their_names_may_have_either_dash(capsys):
    main.main([])
    listed = capsys.readouterr().out
    for name in main.MODULES:
        assert f"\n  {name} " in listed
    main.main(["--version"])
    assert capsys.readouterr().out == "bert-jax 0.1.0\n"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("pretain", "bert-jax has no command pretain. Did you mean pretrain?"),
        ("xyzzy", "bert-jax has no command xyzzy. bert-jax --help lists them"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest_name(typed, message):
    with pytest.raises(UserError, match="no command") as refused:
        main.main([typed])
    assert str(refused.value) == message


def test_a_command_runs_in_any_folder_and_its_help_and_errors_name_it(tmp_path):
    shown = bert_jax("merge_shards", "--help", folder=tmp_path)
    assert shown.returncode == 0
    assert "usage: bert-jax merge-shards" in shown.stdout
    refused = bert_jax("inspect-shards", folder=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert refused.stderr.endswith("See: bert-jax inspect-shards --help\n")


@pytest.mark.parametrize("name", main.MODULES)
def test_help_begins_with_what_is_required_and_fits_a_screen(name):
    shown = reference.help_text(name).splitlines()
    assert shown[0].startswith(f"usage: bert-jax {name} ") and "[OPTIONS]" in "".join(shown[:3])
    headings = [line.rstrip(":") for line in shown if re.fullmatch(r"\S.*:", line) and line.islower()]
    assert headings[-1] and "options" in headings and headings.index("options") == headings.count("required")
    assert len(shown) <= 60


def test_the_list_of_commands_does_not_wait_for_jax():
    code = "import sys, bert_jax.commands.main; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_recipe_is_found_by_its_name(monkeypatch, tmp_path):
    """Also in a folder whose own `configs` has a file of that name, which only its path names."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "bert_tiny.py").write_text("raise RuntimeError('not this one')\n")
    files = {path.stem: path for path in (ROOT / "configs").glob("[!_]*.py")}
    monkeypatch.chdir(tmp_path)
    assert shipped_recipes() == dict(sorted(files.items()))
    for name, file in files.items():
        kind = FinetuneConfig if "FinetuneConfig(" in file.read_text(encoding="utf-8") else PretrainConfig
        assert config.from_flags(kind, name) == config.from_flags(kind, str(file)), name
    assert config.from_flags(FinetuneConfig, "glue:task=cola").task.name == "cola"
    with pytest.raises(RuntimeError, match="not this one"):
        config.from_flags(PretrainConfig, "configs/bert_tiny.py")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("bert_bsae", "Did you mean bert_base?"),
        ("configs/bert_base.py", "bert_jax has one of that name: write bert_base"),
        ("zzz", "Give a file or the name of a recipe"),
    ],
)
def test_an_unknown_recipe_is_refused_with_advice(name, advice, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"no such recipe: {name}") as refused:
        config.from_flags(PretrainConfig, name)
    assert advice in str(refused.value)


def test_keys_are_listed_with_type_default_and_meaning(capsys):
    keys.main([])
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    for kind in (PretrainConfig, FinetuneConfig):
        assert {key.name for key in options.keys(kind())} <= {*names}
    assert names == sorted(names)
    keys.main(["^optimizer.learning_rate$"])  # of which the commands have other defaults
    shown = capsys.readouterr().out
    assert "optimizer.learning_rate: float = 3e-05   [finetune]\n    the peak\n" in shown
    assert "optimizer.learning_rate: float = 0.0001   [pretrain]\n" in shown
    for word, key in (
        ("num_train_epochs", "epochs"),
        ("lr", "optimizer.learning_rate"),
        ("config.task.dev", "task.dev"),
    ):
        keys.main([word])
        assert f"\n{key}: " in f"\n{capsys.readouterr().out}"
    with pytest.raises(UserError, match="output_dir is no key here, but the flag --workdir"):
        keys.main(["output_dir"])
    keys.main(["^mesh.fsdp$"])
    assert (
        capsys.readouterr().out == "mesh.fsdp: int = 1\n    shards the rows, the parameters and the optimizer state\n"
    )
    for pattern, said in (("learning_rat3", "no key or meaning matches"), ("(", "is not a regular expression")):
        with pytest.raises(UserError, match=said):
            keys.main([pattern])


def test_recipes_are_listed_shown_and_copied(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("glue").write_bytes(b"\xff")  # a file of the user, which ./glue names
    assert recipe_file("glue") == shipped_recipes()["glue"] and recipe_file("./glue") == Path("glue")
    recipes.main(["glue"])
    assert "GLUE" in capsys.readouterr().out
    recipes.main([])
    pretraining, finetuning = capsys.readouterr().out.removeprefix("pretrain:\n").split("finetune:\n")
    names = [[re.split(r"[ [:]", line)[2] for line in part.splitlines()] for part in (pretraining, finetuning)]
    assert sorted(names[0] + names[1]) == list(shipped_recipes()) and names == [*map(sorted, names)]
    assert "electra" in names[0] and "glue" in names[1]
    assert "\n  modernbert[:base] " in pretraining
    recipes.main(["xlmr"])
    assert "Conneau et al. 2020" in capsys.readouterr().out
    recipes.main(["xlmr", "--copy", "mine.py"])
    assert "--config mine.py" in capsys.readouterr().out
    assert config.from_flags(PretrainConfig, "mine.py:large") == config.from_flags(PretrainConfig, "xlmr:large")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonesuch_at_all"], "no such recipe"),
        (["xlmr", "--copy", "taken.py"], "exists"),
        (["--copy", "new.py"], "--copy needs the recipe"),
        (["taken.py"], "is your own file"),
    ],
)
def test_recipes_refuses_mistakes(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.py").write_text("")
    with pytest.raises(UserError, match=message):
        recipes.main(arguments)


@pytest.mark.slow
def test_a_wheel_holds_two_packages_and_works_from_an_empty_folder(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path / "wheel"), "."],
        cwd=_copied(tmp_path / "source"),
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("pip finds no setuptools to build a wheel with")
    assert built.returncode == 0, built.stderr
    [wheel] = (tmp_path / "wheel").iterdir()
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir()} == {"bert_jax", "data_prep", "bert_jax-0.1.0.dist-info"}
    metadata = (site / "bert_jax-0.1.0.dist-info" / "METADATA").read_text(encoding="utf-8")
    headers, _, description = metadata.partition("\n\n")
    assert "Classifier: Programming Language :: Python :: 3.11" in headers
    assert description.strip() == without_relative_links((ROOT / "README.md").read_text(encoding="utf-8")).strip()
    assert (site / "bert_jax" / "py.typed").exists() and len(list(site.glob("data_prep/sample/books/*.xz"))) == 10
    empty = tmp_path / "empty"
    empty.mkdir()
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import bert_jax.commands.main as c, bert_jax.config as f;"
        " print(c.__file__); c.main(['recipes']); "
    )
    shown = subprocess.run(
        [sys.executable, "-P", "-c", code, str(site)], cwd=empty, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert shown[0] == str(site / "bert_jax" / "commands" / "main.py")
    assert len(shown) == 3 + len(shipped_recipes())


def _copied(folder: Path) -> Path:
    """The files of the repository, without what tools leave in a checkout."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder

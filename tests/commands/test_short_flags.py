"""One flag for one thing: keys that pretrain and finetune take as flags, and the names that commands have in common."""

import re

import pytest

from bert_jax import config
from bert_jax.commands import finetune
from bert_jax.config import FinetuneConfig, PretrainConfig, loading, options
from bert_jax.errors import UserError
from data_prep import build_options
from data_prep.build_options import BuildOptions
from data_prep.vocabulary import TokenizerOptions
from website import reference

VALUES = {"learning_rate": "0.5", "batch_size": "48", "compute_dtype": "bfloat16", "budget_minutes": "2.5"}
VALUES |= {"steps": "40", "epochs": "2.5", "seed": "7", "seeds": "0,7,9", "max_length": "64", "label_map": "{0: no}"}
RECIPES = {"bert_tiny": PretrainConfig, "own": FinetuneConfig}
LENGTH = r"--seq_len( T)?, --max_length T"  # Python 3.13 and later print the value once, after the last name
TEXT = r"--text_field( NAME)?, --text NAME"
NAMES = {  # by commands that import without jax; the others have tests of their own
    "build-examples": [LENGTH, TEXT],
    "train-tokenizer": [TEXT],
    "clean": [TEXT],
    "plan": [LENGTH],
}


def value_of(tree: dict, key: str) -> object:
    """The value of a dotted key, None where the tree has none."""
    section, _, name = key.rpartition(".")
    return (tree.get(section, {}) if section else tree).get(name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_flag_sets_its_key_and_is_in_the_help(recipe):
    kind = RECIPES[recipe]
    tree, listed = config.to_dict(config.from_flags(kind, recipe)), loading.help_text(kind)
    own = {flag: key for flag, key in loading.KEYS.items() if value_of(tree, key) is not None}
    assert len(own) == {"bert_tiny": 10, "own": len(loading.KEYS) - 1}[recipe]
    values = {flag: VALUES.get(flag, "there") for flag in own}
    wanted = config.from_flags(kind, recipe, [f"--config.{own[flag]}={value}" for flag, value in values.items()])
    assert config.from_flags(kind, recipe, [f"--{flag}={value}" for flag, value in values.items()]) == wanted
    separate = [part for flag, value in values.items() for part in (f"--{flag}", value)]
    assert config.from_flags(kind, recipe, separate) == wanted
    assert config.from_flags(kind, recipe, [*separate, "--config.seed", values["seed"]]) == wanted
    for flag, key in own.items():
        assert value_of(config.to_dict(wanted), key) != value_of(tree, key), flag
        assert f"--{flag}: {key}" in " ".join(listed.split())
    for flag in loading.KEYS.keys() - own:
        assert f"--{flag}: " not in listed
        with pytest.raises(UserError, match=f"unknown flag --{flag}, which sets config.{loading.KEYS[flag]}: the"):
            config.from_flags(kind, recipe, [f"--{flag}=1"])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--label=a", "--config.task.label=b"], r"^--label is a and --config.task.label is b, but they set one key"),
        (["--config.init_from", "b", "--checkpoint", "a"], r"^--config.init_from is b and --checkpoint is a, but"),
        (["--text"], "^--text has no value; write --text=VALUE"),
        (["--text", "--label=a"], "^--text has no value; write --text=VALUE"),
    ],
)
def test_contradictions_and_missing_values_are_refused(typed, said):
    with pytest.raises(UserError, match=said):
        config.from_flags(FinetuneConfig, "own", typed)


def test_the_last_of_equal_flags_counts_as_for_keys():
    assert config.from_flags(FinetuneConfig, "own", ["--seed=1", "--config.epochs=2", "--seed", "3"]).seed == 3
    assert config.from_flags(FinetuneConfig, "own", ["--seed=1", "--seed=3", "--config.seed=3"]).seed == 3
    assert config.from_flags(FinetuneConfig, "own", ["--seeds=0,7,9", "--config.seeds=0,7,9"]).seeds == (0, 7, 9)


def test_the_reference_has_every_short_flag():
    page = reference.config_page()
    for flag, key in loading.KEYS.items():
        assert f"| `--{flag}` | `{key}` |" in page


@pytest.mark.parametrize("command", NAMES)
def test_help_lists_all_names_of_a_flag(command):
    shown = reference.help_text(command)
    for names in NAMES[command]:
        assert re.search(names, shown)


def test_options_of_data_preparation_have_the_names_of_other_commands():
    required = ["--input=a", "--tokenizer=b", "--output=c"]
    wanted = build_options.parse([*required, "--seq_len=64", "--text_field=body", "--nolowercase"])
    assert build_options.parse([*required, "--max_length=64", "--text=body", "--no-lowercase"]) == wanted
    assert options.by_field(BuildOptions, {"max_length": 64, "seed": 1}) == {"seq_len": 64, "seed": 1}
    assert options.by_field(TokenizerOptions, {"text": "body"}) == {"text_field": "body"}
    with pytest.raises(UserError, match="text_field and text are the same option; give one of them"):
        options.by_field(BuildOptions, {"text": "a", "text_field": "b"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_lenght": 32}, r"unknown option sequence_lenght; did you mean seq_len\?"),
        ({"rows": 32}, "unknown option rows; choose from dedup, delete_rate.*"),
        ({"seq_len": "32"}, "seq_len is '32'; expected int"),
        ({"seq_len": True}, "seq_len is True; expected int"),
        ({"weights": (1, "2")}, r"weights is \(1, '2'\); expected a tuple of float"),
        ({"tokenizer": 3}, "tokenizer is 3; expected str or Path"),
        ({}, "options are missing: seq_len"),
    ],
)
def test_mistakes_in_keywords_are_named(changes, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        options.from_keywords(BuildOptions, {"input": "a", "tokenizer": "b", "output": "c"} | changes)


def test_a_file_and_flags_are_a_whole_fine_tuning_command(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(finetune, "finetune", lambda *run, verbose: started.append(run) or {})
    monkeypatch.setattr(finetune.trials, "table", lambda result: "")
    monkeypatch.setattr(finetune, "write_on_every_host", lambda: None)
    short = ["reviews.csv", "--text=review", "--label", "stars", "--model", "hf:NAME", "--output", "runs/stars"]
    finetune.main(short)
    keys = {"task.train": "reviews.csv", "task.text": "review", "task.label": "stars", "init_from": "hf:NAME"}
    finetune.main(["--config=own", "--workdir=runs/stars", *(f"--config.{key}={value}" for key, value in keys.items())])
    assert started[0] == started[1] and started[0][1] == "runs/stars"
    with pytest.raises(UserError, match=r"unexpected argument 'b\.csv'\. Write overrides as --config\.KEY=VALUE"):
        finetune.main(["a.csv", "b.csv", "--output=runs/stars"])

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax import config
from bert_jax.config import (
    AdamW,
    CausalLM,
    CosineSchedule,
    FinetuneConfig,
    MaskedLM,
    ModelConfig,
    Muon,
    ObjectiveConfig,
    Phases,
    PretrainConfig,
    WSDSchedule,
)
from bert_jax.config.loading import OTHER_WORDS, literal
from bert_jax.config.options import keys
from bert_jax.errors import UserError

RECIPE = "configs/bert_tiny.py"


def read(*overrides: str) -> PretrainConfig:
    return config.from_flags(PretrainConfig, RECIPE, overrides)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent.parent)


def test_overrides_reach_every_depth_and_keep_their_type():
    built = read("--config.steps=7", "--config.optimizer.learning_rate=0.5", "--config.init_from=there")
    assert (built.steps, built.optimizer.learning_rate, built.init_from) == (7, 0.5, "there")


def test_a_field_that_is_none_may_be_overridden():
    assert read("--config.model.dropout=0.0").model.dropout == 0.0
    assert read().model.dropout is None


def test_none_unsets_a_number_that_may_be_none():
    assert read("--config.data.mask_rate=none").data.mask_rate is None
    assert read("--config.data.mask_rate=0.2", "--config.data.mask_rate=None").data.mask_rate is None
    assert read("--config.data.mask_rate=none", "--config.data.mask_rate=0.2").data.mask_rate == 0.2
    assert read("--config.data.mask_rate", "none").data.mask_rate is None
    assert read("--config.data.mask_rate", "none", "--config.data.mask_rate", "0.2").data.mask_rate == 0.2
    apart = read("--config.model.positions", "none", "--config.model.dropout", "none")
    assert (apart.model.positions, apart.model.dropout) == ("none", None)
    built = read("--config.model.positions=none", "--config.model.dropout=none", "--config.model.bias=none")
    assert (built.model.positions, built.model.dropout, built.model.bias) == ("none", None, None)
    with pytest.raises(UserError, match=r"config\.steps is None\. Give a value of type int"):
        read("--config.steps=none")


@pytest.mark.parametrize(
    ("overrides", "objective"),
    [
        (["--config.objective.z_loss=1e-4", "--config.objective=mlm"], MaskedLM(z_loss=1e-4)),
        (["--config.objective.kind=causal"], CausalLM()),
        (["--config.objective={kind: mlm, next_sentence: false}"], MaskedLM(next_sentence=False)),
        (["--config.objective", "phases", "--config.objective.phases={0: mlm}"], Phases({0: "mlm"})),
    ],
)
def test_a_kind_has_options_of_its_own_in_any_order_of_the_flags(overrides, objective):
    assert read(*overrides).objective == objective


def test_the_values_of_keys_that_both_kinds_have_stay():
    flags = ("--config.optimizer=muon", "--config.optimizer.momentum=0.9", "--config.optimizer.schedule=wsd")
    found = read(*flags, "--config.optimizer.schedule.decay_share=0.2").optimizer
    schedule = WSDSchedule(warmup_steps=200, decay_share=0.2)  # 200 and the rate are the recipe's
    assert found == Muon(learning_rate=1e-3, schedule=schedule, momentum=0.9)
    changed = config.change(read(*flags), {"optimizer": "adamw", "optimizer.schedule": "cosine"}).optimizer
    assert changed == AdamW(learning_rate=1e-3, schedule=CosineSchedule(warmup_steps=200))


@pytest.mark.parametrize(
    "values",
    [
        {"objective": MaskedLM(z_loss=0.1, next_sentence=False)},
        {"objective": {"kind": "mlm", "z_loss": 0.1, "next_sentence": False}},
        {"objective.next_sentence": False, "objective.kind": "mlm", "objective": {"z_loss": 0.1}},
    ],
)
def test_python_sets_a_kind_by_its_class_by_a_mapping_or_by_its_keys(values):
    built = config.from_values(PretrainConfig, RECIPE, values)
    assert built.objective == MaskedLM(z_loss=0.1, next_sentence=False)
    assert config.load(PretrainConfig, config.recipe(built)) == built
    assert config.load(PretrainConfig, config.to_dict(built)) == built
    assert config.load(ObjectiveConfig, {}) == PretrainConfig().objective


def test_keys_of_all_kinds_are_listed_once_with_the_kinds_that_have_them():
    listed = {key.name: key for key in keys(PretrainConfig(), every_kind=True)}
    assert len(listed) == len(keys(PretrainConfig(), every_kind=True))
    assert listed["objective"].default == "auto" and listed["optimizer.momentum"].meaning.startswith("muon: ")
    assert listed["objective.z_loss"].meaning.startswith("mlm, causal, phases: ")
    assert listed["optimizer.schedule.decay_share"].meaning.startswith("wsd: ")
    assert not listed["optimizer.beta1"].meaning.startswith("adamw")


def test_a_recipe_survives_the_way_through_a_config_dict():
    built = FinetuneConfig(seeds=(3, 4), batch_size=8)
    assert config.load(FinetuneConfig, config.recipe(built)) == built


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--config.stepz=5"], r"unknown key config\.stepz; did you mean config\.steps\?"),
        (
            ["--config.objective.z_loss=1e-4"],
            r"objective\.z_loss: config\.objective=auto does not have it\. Set --config\.objective=mlm or causal",
        ),
        (["--config.learning_rate=1"], r"did you mean config\.optimizer\.learning_rate\?"),
        (["--config.optimizer.decay_share=1"], r"did you mean config\.optimizer\.schedule\.decay_share\?"),
        (["--config.objective=mml"], r"unknown config\.objective 'mml'; did you mean mlm\?"),
        (["--config.objective.rate=1"], r"config\.objective=auto has no keys"),
        (["--config.optimizer.momentun=1"], r"\.momentun; did you mean config\.optimizer\.momentum"),
        (["--config.data.learning_rate=1"], r"\.learning_rate; did you mean config\.optimizer\.learning_rate"),
        (["--config.clipnorm=1"], r"unknown key config\.clipnorm; did you mean config\.optimizer\.clip_norm\?"),
        (["--config.lr=1"], r"unknown key config\.lr; did you mean config\.optimizer\.learning_rate\?"),
        (["--per_device_train_batch_size=8"], r"unknown flag .*; did you mean --config\.batch_size\?"),
        (["--output_dir=runs"], r"unknown flag --output_dir; did you mean --workdir\?"),
        (["--config.output_dir=runs"], r"unknown key config\.output_dir; did you mean --workdir\?"),
        (["--config.optimizer=3"], r"unknown config\.optimizer 3; choose from adamw, lamb"),
        (
            ["--config.model.presett", "mini"],
            r"unknown key config\.model\.presett; did you mean config\.model\.preset\?",
        ),
        (["--config.mesh.sideways=1"], r"unknown key config\.mesh\.sideways; choose from compiler_options, data"),
        (["--config.steps.every=1"], r"config\.steps is a single value"),
        (["--config.steps=many"], "steps"),
        (["stray"], "stray"),
        (["--microbatches=3"], r"unknown flag --microbatches; write the key as --config\.microbatches=VALUE"),
        (["--model.preset", "mini"], r"unknown flag --model\.preset; write the key as --config\.model\.preset=VALUE"),
    ],
)
def test_a_mistake_in_an_override_is_named(overrides, said):
    with pytest.raises(UserError, match=said):
        read(*overrides)


@pytest.mark.parametrize(
    ("read_wrong", "said"),
    [
        (lambda: config.from_flags(PretrainConfig, "configs/nowhere.py"), r"nowhere\.py"),
        (lambda: config.from_flags(PretrainConfig, f"{RECIPE}:task=sst2"), "takes no argument"),
        (
            lambda: config.load(PretrainConfig, {"optimizer": {"learning_rat": 1.0}}),
            r"config\.optimizer\.learning_rat.*learning_rate",
        ),
        (
            lambda: config.load(PretrainConfig, {"batch_size": "large"}),
            r"config\.batch_size is 'large'\. Give a value of type int",
        ),
        (lambda: config.load(ModelConfig, {}, "model"), "vocab_size is missing"),
        *(
            (lambda seed=seed: PretrainConfig(seed=seed), rf"config.seed is {seed}. Use a whole number from 0 to 42949")
            for seed in (-1, 2**32, 2**80)
        ),
        *(
            (
                lambda name=name, value=value: PretrainConfig(**{name: value}),
                rf"config\.{name} is {value}\. Use a finite number of at least 0",
            )
            for name, value in (("steps", -1), ("budget_minutes", -0.5), ("log_every", -10))
        ),
    ],
)
def test_a_wrong_recipe_key_or_value_is_refused_by_name(read_wrong, said):
    with pytest.raises(UserError, match=said):
        read_wrong()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("heads", 0, "model.heads is 0. Use a finite number of at least 1"),
        ("heads", 3, "model.width 32 is not a multiple of model.heads 3"),
        ("norm", "rms", "unknown model.norm 'rms'; choose from post, pre, pre_but_first"),
        ("dropout", 1.0, "model.dropout is 1.0"),
        ("window", -1, "model.window is -1. Use a finite number of at least 0"),
        ("rotary_base", -1.0, "model.rotary_base is -1.0. Use a finite number of at least 1"),
        ("rotary_base", float("inf"), "model.rotary_base is inf. Use a finite number of at least 1"),
        ("layer_norm_epsilon", float("nan"), "model.layer_norm_epsilon is nan. Use a finite number of at least 0"),
    ],
)
def test_an_architecture_that_there_cannot_be_names_the_field(tiny_config, field, value, said):
    with pytest.raises(UserError, match=re.escape(said)):
        dataclasses.replace(tiny_config, **{field: value})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 5e-4),
        ("-3", -3),
        ("true", True),
        ("None", None),
        ("mlm", "mlm"),
        ("0, 7, 9", (0, 7, 9)),
        ("[f1, 'a b']", ("f1", "a b")),
        ("{0: 0.3, 5000: 0.15}", {0: 0.3, 5000: 0.15}),
        ("{wiki: ('a/b', 0.7), books: 'c'}", {"wiki": ("a/b", 0.7), "books": "c"}),
        ("{optimizer.learning_rate: (1e-5, 3e-5)}", {"optimizer.learning_rate": (1e-5, 3e-5)}),
    ],
)
def test_a_literal_is_pythons_and_a_bare_word_is_text(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a/b", "'a / b' is not a Python literal; put text in quotes"),
        ("{0: a-b}", "put text in quotes"),
        ("f(x)", "not a Python literal"),
        ("__import__('os').system", "not a Python literal"),
        ("{0: 1, 0: 2}", "the key 0 occurs twice"),
        ("(1,", "not a Python literal"),
        ("{{a: 1}: 2}", "not a Python literal"),
        ("[x for x in y]", "not a Python literal"),
        ("f'{x}'", "not a Python literal"),
    ],
)
def test_what_is_no_literal_is_refused_and_never_run(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        literal(text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_every_plain_value_is_read_as_pythons_parser_reads_it(value):
    assert literal(repr(value)) == ast.literal_eval(repr(value)) == value


def test_text_is_taken_as_it_is_where_a_key_is_text():
    built = config.from_flags(
        FinetuneConfig,
        "own",
        ["--config.task.text=1", "--config.task.label=a b,c", "--config.task.labels=01, B-PER", "--label_map={0: no}"],
    ).task
    assert (built.text, built.label, built.labels) == ("1", ("a b", "c"), ("01", "B-PER"))
    assert built.label_map == {"0": "no"}
    assert config.from_flags(FinetuneConfig, "own", ["--config.task.class_weights=balanced"]).task.class_weights
    weights = config.from_flags(FinetuneConfig, "own", ["--config.task.class_weights={a: 2}"]).task.class_weights
    assert weights == {"a": 2.0}


def test_words_of_other_libraries_are_those_of_the_table_in_the_documents() -> None:
    """Each word is in the row of the key that it means, and the key exists; words that are keys here need no entry."""
    every = {key.name for config in (PretrainConfig(), FinetuneConfig()) for key in keys(config, every_kind=True)}
    text = Path("docs/recipes.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| ") and line.count("|") == 4]
    words = {word: here for one, other, here in rows for word in re.findall(r"`(\w+)`", one + other)}
    assert {*OTHER_WORDS} <= {*words, "lr"}
    for word, here in words.items():
        key = OTHER_WORDS.get(word)
        assert f"`{key}`" in here if key else {path.rpartition(".")[2] for path in every} & {word, "steps"}, word
        assert not key or key in every or key == "--workdir", word

"""Every recipe in configs/ loads, and its model has a shape and a place on the mesh."""

from pathlib import Path

import jax
import pytest

import bert_jax.lineage  # noqa: F401 (adds its presets)
from bert_jax import config, pretraining
from bert_jax.config import FinetuneConfig, PretrainConfig
from bert_jax.data.schedules import StepSchedule, mask_rates
from bert_jax.errors import UserError
from bert_jax.model import bert, sizes
from bert_jax.train import optim, sharding
from bert_jax.train.objectives import CausalLMObjective, MaskedLMObjective

ROOT = Path(__file__).parent.parent.parent
RECIPES = sorted(path for path in ROOT.glob("configs/*.py") if path.name != "__init__.py")
FINETUNING = {
    "choice": ":task=swag",
    "embedding": "",
    "glue": ":task=sst2",
    "own": "",
    "squad": ":task=squad2",
    "spans": ":kind=span_pairs",
    "superglue": ":task=wic",
    "tagging": ":task=ewt",
}

# What a pretraining recipe takes, and the preset that it is for.
PRETRAINING = {
    "ablation:ltr": "base",
    "ablation:no_nsp": "base",
    "academic_bert": "academic_large",
    "albert:base": "albert_base",
    "albert:base_v2": "albert_base_v2",
    "albert:large": "albert_large",
    "albert:large_v2": "albert_large_v2",
    "albert:xlarge": "albert_xlarge",
    "albert:xlarge_v2": "albert_xlarge_v2",
    "albert:xxlarge": "albert_xxlarge",
    "bert_base": "base",
    "bert_large:adamw": "large",
    "bert_large:lamb": "large",
    "bert_medium": "medium",
    "bert_mini": "mini",
    "bert_multilingual": "base",
    "bert_small": "small",
    "bert_tiny": "tiny",
    "cpu_speedrun": "modernbert_base",
    "diffusion": "base",
    "distilbert": "base",
    "electra:base": "electra_base",
    "electra:large": "electra_large",
    "electra:small": "electra_small",
    "elmo:medium": "elmo_medium",
    "elmo:original": "elmo",
    "elmo:small": "elmo_small",
    "feed_forward_lm": "feed_forward_lm",
    "gpt:gpt": "gpt",
    "gpt:gpt2": "gpt2",
    "lstm:large": "lstm_large",
    "lstm:medium": "lstm_medium",
    "lstm:rnn": "rnn",
    "modernbert:base": "modernbert_base",
    "modernbert:large": "modernbert_large",
    "mosaicbert:base": "mosaicbert_base",
    "mosaicbert:large": "mosaicbert_large",
    "phases": "modernbert_base",
    "relative:buckets": "buckets_base",
    "relative:shaw": "shaw_base",
    "roberta:base": "roberta_base",
    "roberta:large": "roberta_large",
    "spanbert:base": "spanbert_base",
    "spanbert:large": "spanbert_large",
    "transformer": "transformer_base",
    "xlmr:base": "xlmr_base",
    "xlmr:large": "xlmr_large",
}

# Recipes whose architecture is that of a checkpoint.
CONTINUING = ("continued",)


def named(recipe: str) -> str:
    """The flag's value for a recipe of PRETRAINING."""
    file, colon, argument = recipe.partition(":")
    return f"{ROOT}/configs/{file}.py{colon}{argument}"


def test_every_recipe_and_every_preset_exists():
    names = (*PRETRAINING, *FINETUNING, *CONTINUING)
    assert {name.partition(":")[0] for name in names} == {path.stem for path in RECIPES}
    assert set(PRETRAINING.values()) == set(sizes.PRESETS)


@pytest.mark.parametrize("name", PRETRAINING)
def test_a_pretraining_recipe_builds_its_model_on_the_mesh(name):
    recipe = config.from_flags(PretrainConfig, named(name))
    assert recipe.model.preset == PRETRAINING[name]
    model = sizes.model_config(recipe.model, vocab_size=30522)
    language_model = model.causal or model.directions > 1
    objective = (
        CausalLMObjective()
        if language_model
        else MaskedLMObjective(span_boundary=getattr(recipe.objective, "span_boundary", False))
    )
    params = bert.abstract_params(model, objective.heads)
    mesh = sharding.make_mesh(recipe.mesh)
    sharding.check_batch(recipe.batch_size, recipe.microbatches, mesh)
    state = jax.eval_shape(optim.build(recipe.optimizer, params).init, params)
    placed = sharding.with_shardings(mesh, (params, state))
    assert all(leaf.sharding.mesh.size == 8 for leaf in jax.tree.leaves(placed))


@pytest.mark.parametrize("name", ["cpu_speedrun", "electra:large", "modernbert:base", "mosaicbert:large"])
def test_the_mask_rate_of_a_recipe_gives_way_to_a_schedule(name):
    flags = ["--config.data.mask_schedule={0: 0.3, 2: 0.15}"]
    with pytest.raises(UserError, match=r"both set; .*--config\.data\.mask_rate=none unsets the rate of a recipe"):
        rates_of(config.from_flags(PretrainConfig, named(name), flags))
    recipe = config.from_flags(PretrainConfig, named(name), [*flags, "--config.data.mask_rate=none"])
    assert rates_of(recipe) == StepSchedule((0, 2), (0.3, 0.15))


def rates_of(recipe: PretrainConfig) -> StepSchedule[float] | None:
    return mask_rates(recipe.data.mask_rate, recipe.data.mask_schedule, recipe.data.mask_shape)


@pytest.mark.parametrize("name", CONTINUING)
def test_a_recipe_for_checkpoints_needs_one(name, shards_dir, tmp_path):
    recipe = config.from_flags(PretrainConfig, named(name), [f"--config.data.train={shards_dir}"])
    with pytest.raises(UserError, match=r"set --config\.init_from=CHECKPOINT"):
        pretraining.pretrain(recipe, tmp_path / "run")


@pytest.mark.parametrize("name", FINETUNING)
def test_a_fine_tuning_recipe_loads(name):
    recipe = config.from_flags(FinetuneConfig, f"{ROOT}/configs/{name}.py{FINETUNING[name]}")
    assert recipe.batch_size > 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_its_command_hardware_and_expected_number(path):
    text = path.read_text(encoding="utf-8")
    assert f" --config {path.stem}" in text
    for word in ("Hardware", "Hours", "Expected", "Source"):
        assert f"\n{word}" in text, f"{path.name} does not say {word}"
    assert "\\\\\n" not in text, "a shell does not continue a command after two backslashes"


@pytest.mark.parametrize("name", sorted({name.partition(":")[0] for name in PRETRAINING if ":" in name}))
def test_an_unknown_argument_of_a_recipe_is_refused_with_the_known_ones(name):
    with pytest.raises(UserError, match=rf"{name}: unknown \w+ huge; choose from \w+(, \w+)+$"):
        config.from_flags(PretrainConfig, named(f"{name}:huge"))

from __future__ import annotations

import pytest
import yaml

from trimtab.core.errors import ConfigError, DataError
from trimtab.core.recipe import Recipe, from_dict, load, parse_overrides, resolve, shipped


def recipe(**fields) -> Recipe:
    base = {"name": "mine", "parts": {"advantage": "baseline", "objective": "clip"}}
    return Recipe(**{**base, **fields})


# ------------------------------------------------------------ layers


def test_layers_go_over_each_other_code_settings_pocket_overrides():
    made = recipe(settings={"steps": 7, "seed": 7, "group_size": 7}, pocket={"seed": 8, "group_size": 8})
    found = resolve(made, {"group_size": 9}).settings
    assert (found.prompts_per_step, found.steps, found.seed, found.group_size) == (32, 7, 8, 9)
    other = resolve(made, {"model": "smollm2-135m"}).settings
    assert (other.steps, other.seed, other.group_size) == (7, 7, 7)
    assert resolve(recipe(settings={"model": "smollm2-135m"}, pocket={"seed": 8})).settings.seed == 0


def test_a_setting_with_a_name_takes_the_name_alone():
    for overrides in ({"engine": "http", "engine.slots": 7}, {"engine.slots": 7, "engine": "http"}):
        engine = resolve("grpo", overrides).settings.engine
        assert (engine.name, engine.slots, engine.chunk) == ("http", 7, 64)
    with pytest.raises(ConfigError, match=r"engine.name: unknown name 'vlm'.*Did you mean 'vllm'"):
        resolve("grpo", {"engine": "vlm"})


def test_a_mapping_in_settings_changes_only_what_it_names():
    found = resolve(recipe(settings={"sampling": {"temperature": 0.5}}), {"learner": {"lr": 0.1}}).settings
    assert (found.sampling.temperature, found.sampling.max_new_tokens) == (0.5, 256)
    assert (found.learner.lr, found.learner.beta1) == (0.1, 0.9)


def test_resolving_does_not_change_the_recipe():
    made = recipe(pocket={"objective.eps_high": 0.3})
    before = Recipe(**vars(made))
    resolve(made, {"objective.eps_low": 0.1, "advantage": "none", "sampling.temperature": 0.5})
    assert made == before
    assert resolve(made).one("objective").eps_low == 0.2


def test_a_whole_slot_is_replaced_before_its_knobs_whatever_the_order():
    for overrides in (
        {"advantage.kind": "leave-one-out", "advantage": "baseline"},
        {"advantage": "baseline", "advantage.kind": "leave-one-out"},
    ):
        assert resolve("reinforce-pp", overrides).parts["advantage"][0].kind == "leave-one-out"


def test_an_empty_slot():
    for empty in (None, "none", []):
        assert resolve("grpo", {"advantage": empty}).parts["advantage"] == []
    assert resolve("grpo").one("stop") is None


def test_a_part_of_two_slots_is_one_object_with_its_knobs_given_at_either():
    for key in ("stop.cutoff", "filter.cutoff", "filter.esr.cutoff"):
        found = resolve("esr", {key: 17})
        assert found.one("stop") is found.parts["filter"][0]
        assert found.one("stop").cutoff == 17
        assert len([p for p in found.all_parts() if p.slug == "esr"]) == 1


# ------------------------------------------------------------ refusals

REFUSALS = [
    ("grpo", {"step": 3}, r"step: unknown name 'step'\. Did you mean 'steps'\?"),
    (
        "grpo",
        {"sampling.temprature": 1.0},
        r"sampling\.temprature: unknown name 'temprature'\. Did you mean 'temperature'",
    ),
    ("grpo", {"samplin.temperature": 1.0}, r"samplin\.temperature: unknown name 'samplin'\. Did you mean 'sampling'"),
    ("grpo", {"sampling": 3}, r"sampling: 3 is not valid\. Allowed: a mapping with temperature"),
    ("grpo", {"steps": -1}, r"steps: -1 is not valid\. Allowed: a value >= 0"),
    ("grpo", {"steps": "many"}, r"steps: 'many' is not valid\. Allowed: a whole number"),
    ("grpo", {"steps.x": 1}, r"steps\.x: unknown name 'steps'"),
    ("grpo", {"objective.eps_hihg": 0.3}, r"objective\.eps_hihg: unknown name 'eps_hihg'\. Did you mean 'eps_high'"),
    ("grpo", {"objective.eps_high": "x"}, r"objective\.eps_high: 'x' is not valid\. Allowed: a number"),
    ("grpo", {"objective": "klip"}, r"objective: unknown name 'klip'\. Did you mean 'clip'"),
    (
        "grpo",
        {"objective": "baseline"},
        r"objective: 'baseline' has no part for the slot 'objective'; it fills advantage",
    ),
    ("grpo", {"stop.cutoff": 3}, r"stop\.cutoff: the slot 'stop' is empty in this recipe\. Fill it first"),
    ("grpo", {"advantage": ["scale", {"by": "x"}]}, r"advantage: .*a part's name, or a mapping with the key 'part'"),
    (
        "grpo",
        {"advantage": ["whiten", "baseline"]},
        r"advantage\.baseline: takes one value per rollout.*behind 'whiten'",
    ),
    ("grpo", {"objective": ["clip", "clip"]}, r"objective: .*one part \(only advantage, correct, filter, reward, stop"),
    ("grpo", {"objective": "none"}, r"nothing to learn from\. Fill the slot 'objective' or 'distill'"),
    ("grpo", {"sampling.top_p": 0.9}, r"top_p < 1 or top_k > 0 cuts the distribution.*Train with top_p=1"),
    ("grpo", {"sampling.top_k": 5}, r"top_p < 1 or top_k > 0"),
    ("opd", {"teacher": ""}, r"opd: needs a teacher and none is set\. Set teacher="),
    ("dapo", {"group_size": 1}, r"group_size: 1 is not valid\. Allowed: at least 2, which 'zero-variance' needs"),
    ("prune-opd", {"filter": "none"}, r"prune-opd: must also stand in the slot 'filter': add filter: prune-opd"),
    (
        "grpo",
        {"advantage": ["whiten", {"part": "whiten", "epsilon": 1e-6}]},
        r"advantage\.whiten\.epsilon: unknown name 'epsilon'\. Did you mean 'eps'",
    ),
    (
        "grpo",
        {"advantage.eps": 1e-3, "advantage": ["scale", "whiten"]},
        r"several parts have the knob 'eps'\. Name one: advantage\.scale\.eps, advantage\.whiten\.eps",
    ),
    ("grpo", {"filter": ["esr", {"part": "prune-opd"}], "stop": "esr"}, r"needs a teacher"),
    (
        "esr",
        {"filter": {"part": "esr", "cutoff": 5}},
        r"filter\.esr: 'esr' also stands in 'stop'; give its knobs there",
    ),
]


@pytest.mark.parametrize(("name", "overrides", "message"), REFUSALS)
def test_what_is_wrong_is_named_with_what_is_allowed(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve(name, overrides)


def test_an_ambiguous_knob_can_be_named_in_full():
    found = resolve("grpo", {"advantage": ["scale", "whiten"], "advantage.scale.eps": 1e-3})
    assert [part.eps for part in found.parts["advantage"]] == [1e-3, 1e-8]


def test_errors_of_a_recipe_file_name_the_recipe():
    with pytest.raises(ConfigError, match=r"recipe mine\.parts\.stopp: unknown name 'stopp'\. Did you mean 'stop'"):
        resolve(recipe(parts={"stopp": "esr"}))
    with pytest.raises(ConfigError, match=r"recipe mine\.pocket\.sed: unknown name 'sed'\. Did you mean 'seed'"):
        resolve(recipe(pocket={"sed": 1}))
    with pytest.raises(ConfigError, match=r"settings\.seedd: unknown name"):
        resolve(recipe(settings={"seedd": 1}))


# ------------------------------------------------------------ files


def test_unknown_recipe():
    with pytest.raises(
        ConfigError, match=r"recipe: unknown name 'prune_opd'\. Did you mean 'prune-opd'\? Allowed: .*grpo"
    ):
        resolve("prune_opd")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("title: [unclosed", ConfigError, "not valid YAML"),
        ("- a\n- b\n", ConfigError, "a mapping with title, parts"),
        ("", ConfigError, "a mapping with title, parts"),
        ("titel: x\n", ConfigError, r"recipe bad\.titel: unknown name 'titel'\. Did you mean 'title'"),
        ("year: soon\n", ConfigError, r"recipe bad\.year: 'soon'.*whole number"),
        ("year: 2024\nyear: 2025\n", ConfigError, r"not valid YAML: the key 'year' stands twice.*line 2"),
        ("parts: {objective: clip, objective: gspo}\n", ConfigError, "the key 'objective' stands twice"),
        ("maturity: finished\n", ConfigError, r"recipe bad\.maturity: unknown name 'finished'.*paper-scale"),
    ],
)
def test_a_bad_file(tmp_path, text, error, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(error, match=message):
        load(str(path))


def test_small_numbers_need_no_point_and_keys_are_text(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("parts: {objective: clip}\nsettings: {learner: {lr: 1e-4}}\npocket: {learner.eps: 2E-6}\n")
    found = resolve(str(path)).settings.learner
    assert (found.lr, found.eps) == (1e-4, 2e-6)
    path.write_text("parts: {objective: clip}\npocket: {1: 2}\n")
    with pytest.raises(ConfigError, match=r"recipe mine\.pocket\.1: 1 is not valid"):
        resolve(str(path))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load(str(tmp_path / "none.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(DataError, match="cannot be read"):
        load(str(tmp_path / "bytes.yaml"))


def test_a_file_by_path_is_read_like_a_shipped_one(tmp_path):
    path = tmp_path / "copy.yaml"
    path.write_text(shipped()["dapo"].read_text(encoding="utf-8"), encoding="utf-8")
    mine, own = resolve(str(path)), resolve("dapo")
    assert mine.recipe.name == "copy"
    assert (mine.settings, mine.parts) == (own.settings, own.parts)


def test_a_changed_configuration_reads_back():
    made = resolve("prune-opd", {"stop.w_drop": 0.25, "stop.form": "streaming", "seed": 5, "drop_layers": [1]})
    again = from_dict(yaml.safe_load(yaml.safe_dump(made.to_dict())))
    assert again.parts == made.parts
    assert again.settings == made.settings
    assert again.parts["filter"][0] is again.one("stop")
    assert again.to_dict() == made.to_dict()


# ------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("items", "parsed"),
    [
        (["steps=3"], {"steps": 3}),
        (["learner.lr=1e-4"], {"learner.lr": 1e-4}),
        (["learner.lr=1E-4", "x=2.5e3"], {"learner.lr": 1e-4, "x": 2500.0}),
        (["model=smollm2-135m"], {"model": "smollm2-135m"}),
        (["task=some/path1e4x"], {"task": "some/path1e4x"}),
        (["advantage=[baseline, scale]"], {"advantage": ["baseline", "scale"]}),
        (["stop={part: esr, cutoff: 5}"], {"stop": {"part": "esr", "cutoff": 5}}),
        (["stop=none", "verify.graded=true", "teacher="], {"stop": "none", "verify.graded": True, "teacher": None}),
        (["data.system=a = b"], {"data.system": "a = b"}),
        (["output.dir=2026-01-01", "task=2026-13-45"], {"output.dir": "2026-01-01", "task": "2026-13-45"}),
        (["learner={lr: 1e-4}"], {"learner": {"lr": 1e-4}}),
    ],
)
def test_overrides_are_yaml(items, parsed):
    assert parse_overrides(items) == parsed


@pytest.mark.parametrize("item", ["steps", "=3", "stop=[esr"])
def test_bad_overrides(item):
    with pytest.raises(ConfigError, match="is not valid"):
        parse_overrides([item])

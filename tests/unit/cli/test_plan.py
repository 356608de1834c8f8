"""``gtpo-megatron plan``."""

import json

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.companions.planner.correction import PHASES, PlanCorrection, write_correction
from recipes.tiny_cpu import ASSETS

RECIPE = "recipes.qwen2_5_32b:gtpo_64gpu"


def test_the_paper_s_recipe_fits(capsys):
    assert dispatch.run(["plan", RECIPE]) == 0
    assert "the recipe's layout fits: TP4 PP4 DP4" in capsys.readouterr().out


@pytest.mark.slow
def test_json_and_overrides(capsys):
    overrides = ["--parallel.tensor-parallel-size", "8", "--update.micro-batch-tokens", "16384"]
    assert dispatch.run(["plan", RECIPE, "--json", "--gpu-memory", "141", *overrides]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["own"]["layout"]["tensor"] == 8
    assert plain["batch"]["micro_batch_tokens"] == 16384
    assert plain["cluster"]["gpu_memory"] == 141 * 2**30


def test_another_number_of_gpus(capsys):
    assert dispatch.run(["plan", RECIPE, "--json", "--gpus", "32", "--gpu", "h200"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["own"] is None
    assert plain["choice"]["layout"]["num_ranks"] == 32
    assert plain["cluster"]["gpu_memory"] == 141 * 2**30


def test_gpus_that_only_generate_come_on_top_of_the_recipe_s(capsys):
    assert dispatch.run(["plan", RECIPE, "--json", "--rollout-gpus", "16"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["cluster"]["num_gpus"] == 80
    assert plain["own"]["layout"]["num_ranks"] == 64
    assert plain["stages"][-1]["role"] == "engine"


def test_engines_on_gpus_of_their_own_leave_some_of_the_last_node_idle(capsys):
    apart = ["--rollout.placement", "disaggregated", "--weight-sync.transport", "process_group"]
    apart += ["--rollout.num-engines", "1"]
    assert dispatch.run(["plan", RECIPE, "--json", *apart]) == 0
    plain = json.loads(capsys.readouterr().out)
    found = {name: plain["cluster"][name] for name in ("num_gpus", "num_rollout_gpus", "num_idle_gpus")}
    assert found == {"num_gpus": 72, "num_rollout_gpus": 4, "num_idle_gpus": 4}
    assert plain["own"]["layout"]["num_ranks"] == 64
    assert plain["engine"]["num_engines"] == 1


@pytest.mark.slow
def test_where_nothing_fits_the_status_is_1(capsys):
    assert dispatch.run(["plan", RECIPE, "--gpu-memory", "30"]) == 1
    assert "no layout fits" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_said_to_help_can_be_typed_and_helps(capsys):
    tight = ["plan", RECIPE, "--json", "--gpus", "16", "--gpu-memory", "40"]
    assert dispatch.run(tight) == 1
    suggestion = json.loads(capsys.readouterr().out)["suggestions"][0]
    assert "--rollout.num-engines 2" in suggestion
    assert dispatch.run([*tight, *suggestion.split(":")[0].split()]) == 0


@pytest.mark.slow
def test_a_model_needs_no_recipe(capsys):
    """The paper's setting on as many GPUs as are asked for; the engine has those that leave room for its cache."""
    assert dispatch.run(["plan", "Qwen/Qwen2.5-32B", "--gpus", "64", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["own"], plain["cluster"]["num_gpus"], plain["cluster"]["is_colocated"]) == (None, 64, True)
    assert (plain["batch"]["num_responses"], plain["batch"]["max_sequence_tokens"]) == (2048, 6144)
    assert (plain["engine"]["num_engines"], plain["engine"]["sequences_in_cache"]) == (16, 106)
    assert dispatch.run(["plan", RECIPE, "--json"]) == 0
    assert plain["choice"]["layout"] == json.loads(capsys.readouterr().out)["choice"]["layout"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen2.5-32B --gpus 16 --rollout.group-size 8"])
def test_the_command_behind_a_model_that_fits_trains_as_planned(capsys, model):
    assert dispatch.run(["plan", *model.split(), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    train, recipe, *options = planned["next_command"].split()[1:]
    assert train == "train"
    options[options.index("FOLDER")] = model.split()[0]
    assert dispatch.run(["plan", recipe, *options, "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["own"]["fits"]
    assert trained["own"]["layout"] == planned["choice"]["layout"]
    for part in ("batch", "engine"):
        assert trained[part] == planned[part]


@pytest.mark.slow
def test_a_model_that_does_not_fit_gets_its_recipe_with_adapters(capsys):
    assert dispatch.run(["plan", "Qwen/Qwen2.5-7B", "--gpus", "1", "--json"]) == 1
    *_, adapters, recipe = json.loads(capsys.readouterr().out)["suggestions"]
    assert dispatch.run(["plan", "Qwen/Qwen2.5-7B", "--gpus", "1", *adapters.split(":")[0].split()]) == 0
    assert recipe.startswith("recipes.qwen2_5_7b:gtpo_lora_1gpu: ")
    assert dispatch.run(["plan", recipe.rpartition(": ")[0]]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "gpus", "engines"),
    [
        (["Qwen/Qwen2.5-7B"], 8, 8),
        (["Qwen/Qwen2.5-0.5B-Instruct", "--gpus=1", "--gpu", "rtx4090"], 1, 1),
        (["Qwen/Qwen2.5-7B", "--gpus", "16", "--gpu_memory=141", "--rollout.group-size", "8"], 16, 16),
        ([str(ASSETS / "tiny_qwen2"), "--gpus", "4"], 4, 4),
        ([str(ASSETS / "tiny_qwen2" / "config.json"), "--gpus", "4"], 4, 4),
        (["Qwen/Qwen3-30B-A3B", "--gpus", "32"], 32, 8),
    ],
)
def test_models_and_gpus(capsys, arguments, gpus, engines):
    assert dispatch.run(["plan", *arguments, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["cluster"]["num_gpus"], plain["engine"]["num_engines"]) == (gpus, engines)
    assert plain["batch"]["num_responses"] == 128 * (8 if "--rollout.group-size" in arguments else 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Qwen/Qwen2.5-33B"], "perhaps you meant 'Qwen2.5-3"),
        (["Qwen/Qwen2.5-32B", "--gpus", "0"], "must be greater than 0"),
        (["Qwen/Qwen2.5-32B", "--gpus"], "Missing value for argument '--gpus'"),
        (["Qwen/Qwen2.5-32B", "--gpus", "12"], "take 8 or 16"),
        (["Qwen/Qwen2.5-32B", "--gpu", "h1000"], "Expected one of ('h100', 'h200'"),
        (["Qwen/Qwen2.5-32B", "--gpsu", "8"], "Perhaps you meant: --gpu"),
        ([], "plan needs a recipe first"),
        (
            ["recipes.qwen2_5_32b:ppo"],
            "it has code_64gpu, dapo_64gpu, dapo_code_64gpu, dapo_lora_8gpu, dapo_published_128gpu, grpo_64gpu, ",
        ),
        ([RECIPE, "--gpus", "60"], "take 56 or 64"),
        ([RECIPE, "--gpus", "-8"], "gpus=-8"),
        ([RECIPE, "--gpus-per-node", "0"], "gpus_per_node=0: must be greater than 0"),
        ([RECIPE, "--gpus-per-node", "-8", "--nodes", "8"], "gpus_per_node=-8: must be greater than 0"),
        (["Qwen/Qwen2.5-32B", "--gpus-per-node", "0"], "gpus_per_node=0: must be greater than 0"),
        ([RECIPE, "--rollout-gpus", "-4"], "rollout_gpus=-4: must be greater than or equal to 0"),
        ([RECIPE, "--gpu-memory", "-1"], "must be greater than 0"),
        ([RECIPE, "--model.path", "Qwen/Qwen2.5-320B"], "known: Qwen/Qwen2.5-0.5B"),
        ([RECIPE, "--rollout.tensor-parallel-size", "3"], "choose from [1, 2, 4, 8]"),
    ],
)
def test_mistakes_say_what_is_wrong_and_have_status_2(arguments, message, capsys):
    """Of an option's value in tyro's words, of the whole request in one line."""
    try:
        status, is_line = dispatch.run(["plan", *arguments]), True
    except SystemExit as stop:
        status, is_line = stop.code, False
    error = capsys.readouterr().err
    assert status == 2
    assert message in " ".join(error.replace("│", " ").split())
    assert not is_line or error.count("\n") == 1


@pytest.mark.slow
def test_the_tiny_recipe_can_be_planned_too(capsys):
    assert dispatch.run(["plan", "recipes.tiny_cpu:gtpo"]) == 0
    assert "the recipe's layout fits: TP2 DP1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_small_model_s_plan_says_what_cpus_need(capsys):
    def parts(tokens, *more):
        words = ["plan", "recipes.tiny_cpu:gtpo", "--json", "--update.micro-batch-tokens", str(tokens), *more]
        assert dispatch.run(words) == 0
        return {one["by"]: one["num_bytes"] for one in json.loads(capsys.readouterr().out)["on_cpu"]}

    some, double = parts(4096), parts(8192)
    assert some["driver, Ray and rewards"] == double["driver, Ray and rewards"]
    assert 1.8 < double["passes of 8,192 tokens"] / some["passes of 4,096 tokens"] < 2.0
    alone = parts(4096, "--parallel.num-ranks", "1", "--parallel.tensor-parallel-size", "1")
    assert alone["ranks"] < some["ranks"]
    assert dispatch.run(["plan", "recipes.tiny_cpu:gtpo"]) == 0
    assert "on one machine's CPUs instead: " in capsys.readouterr().out
    assert dispatch.run(["plan", RECIPE]) == 0
    assert "CPUs" not in capsys.readouterr().out


@pytest.mark.slow
def test_nodes(capsys):
    """A row in turns and one on GPUs apart for each number of nodes."""
    assert dispatch.run(["plan", RECIPE, "--nodes", "8", "16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["num_gpus"], row["num_rollout_gpus"] > 0) for row in rows] == [
        (64, False),
        (64, True),
        (128, False),
        (128, True),
    ]
    assert rows[0]["layout"].startswith("TP4 PP4 DP4")  # the recipe's own
    assert dispatch.run(["plan", RECIPE, "--nodes", "8"]) == 0
    shown = capsys.readouterr().out
    assert "tokens/s/GPU" in shown
    assert "792 h" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--nodes", "0"], "each must be 1 or more"),
        (["--nodes", "8", "--gpus", "64"], "cannot be combined"),
        (["--nodes", "8", "--all"], "nodes cannot be combined with all"),
        (["--nodes", "8", "--response-tail", "0.5"], "response_tail must be above 1"),
    ],
)
def test_nodes_that_cannot_be(options, told, capsys):
    assert dispatch.run(["plan", RECIPE, *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_nodes_take_what_a_preflight_measured_beyond_the_plan(capsys, tmp_path):
    phases = dict.fromkeys(PHASES, 0)
    measured = PlanCorrection(
        recipe="r", layout="l", gpu="g", planned_bytes=phases, measured_bytes=phases | {"generate": 60 << 30}
    )
    write_correction(tmp_path / "correction.json", measured)
    nodes = ["plan", "recipes.qwen2_5_7b:gtpo_8gpu", "--nodes", "1"]
    assert dispatch.run(nodes) == 0
    assert dispatch.run([*nodes, "--correction", str(tmp_path / "correction.json")]) == 1
    assert "no layout fits" in capsys.readouterr().out


def test_nodes_of_a_model_have_the_layout_of_its_plan(capsys):
    """The paper's setting has DP8, because a configuration must have one; four responses are faster otherwise."""
    model = ["plan", "Qwen/Qwen2.5-1.5B", "--data.prompts-per-step", "1", "--rollout.group-size", "4", "--json"]
    assert dispatch.run([*model, "--nodes", "1"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert dispatch.run(model) == 0
    choice = json.loads(capsys.readouterr().out)["choice"]["layout"]
    assert (choice["tensor"], choice["context"], choice["data"]) == (2, 4, 1)
    assert row["layout"] == "TP2 CP4 DP1"


@pytest.mark.slow
def test_a_cache_without_room_for_a_sequence_does_not_fit(capsys):
    small = ["plan", RECIPE, "--json", "--rollout.kv-cache-mib", "100"]
    assert dispatch.run(small) == 1
    plain = json.loads(capsys.readouterr().out)
    assert (plain["own"]["fits"], plain["choice"], plain["engine"]["sequences_in_cache"]) == (False, None, 0)
    assert plain["own"]["reason"] == "an engine's cache lacks 284 MiB a GPU for one sequence of full length"
    larger = next(line for line in plain["suggestions"] if line.startswith("--rollout.kv-cache-mib"))
    assert dispatch.run([*small, *larger.split(":")[0].split()]) == 0
    assert json.loads(capsys.readouterr().out)["engine"]["sequences_in_cache"] == 128

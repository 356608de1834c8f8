"""Others beside ours: how their layers are called, and what becomes of one that fails, lacks or takes too long."""

import importlib.util
import json
import os
import sys
import time
import types

import pytest
import torch

from benchmarks import eager_vllm, peer_step, peer_worker, vocab_peers
from benchmarks.gpu_proof import __main__ as runner
from benchmarks.gpu_proof import peer_heads, peer_steps
from benchmarks.gpu_proof.page import values_of
from benchmarks.gpu_proof.report import WHOLE, Report
from benchmarks.gpu_proof.sizes import sizes_of
from benchmarks.peer_sizes import SIZES
from gtpo_megatron.cli.recipe import parse
from gtpo_megatron.cli.train import TrainOptions
from gtpo_megatron.distributed.vocab_parallel import linear_token_scores

CPU = torch.device("cpu")
SMALL = sizes_of(CPU, small=True)


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 16, generator=generator).requires_grad_()
    weight = torch.randn(40, 16, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, 40, (10,), generator=generator)


def loss_of(logits, targets, reduction):
    assert reduction == "none"
    return torch.nn.functional.cross_entropy(logits, targets, reduction=reduction)


@pytest.fixture
def libraries(monkeypatch):
    """Liger and cut-cross-entropy, as far as they are called; what they were told."""
    told = []

    class Function:
        @staticmethod
        def apply(hidden, weight, targets, bias, class_weights, *options):
            assert bias is None
            assert class_weights is None
            told.append(options[-1])
            return loss_of(hidden @ weight.t(), targets, options[3]), None, None, None

    def linear_cross_entropy(hidden, weight, targets, reduction, filter_eps):
        told.append(filter_eps)
        return loss_of(hidden @ weight.t(), targets, reduction)

    modules = {
        "liger_kernel": {},
        "liger_kernel.ops": {},
        "liger_kernel.ops.fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyFunction": Function},
        "cut_cross_entropy": {"linear_cross_entropy": linear_cross_entropy},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return told


@pytest.mark.parametrize("name", [name for name in vocab_peers.PEERS if name != "torch_compiled"])
def test_every_peer_gives_the_same_log_probs_and_gradients(name, libraries):
    """Each with a gradient of its own for every token, entropies where there are some."""
    peer = vocab_peers.PEERS[name]
    if peer.package == "trl":
        pytest.importorskip("trl")
    hidden, weight, targets = inputs()
    upstream = torch.linspace(-1, 2, 10)
    wanted = linear_token_scores(hidden, weight, targets)
    gradients = torch.autograd.grad((wanted.logprobs * upstream).sum(), [hidden, weight])
    logprobs, entropy = peer.scores(hidden, weight, targets, 4)
    torch.testing.assert_close(logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad((logprobs * upstream).sum(), [hidden, weight])
    torch.testing.assert_close(got, gradients, rtol=1e-4, atol=1e-5)
    if entropy is not None:
        torch.testing.assert_close(entropy, wanted.entropy, rtol=1e-5, atol=1e-5)
    assert (entropy is None) == ("no entropy" in peer.about or name == "cut_cross_entropy_exact")


def test_peers_are_told_what_to_round_and_to_leave_out(libraries):
    for name in ("liger", "liger_float32", "cut_cross_entropy", "cut_cross_entropy_exact"):
        vocab_peers.PEERS[name].scores(*inputs(), 4)
    assert libraries == [None, torch.float32, "high", None]


def test_what_a_peer_lacks(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else object())
    told = {name: vocab_peers.lacks(peer, CPU) for name, peer in vocab_peers.PEERS.items()}
    assert told["torch_chunked"] == told["trl"] == ""
    assert told["liger"] == "liger_kernel is not installed"
    assert told["cut_cross_entropy"].startswith("its kernels run on a GPU only")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else object())
    assert vocab_peers.lacks(vocab_peers.PEERS["liger"], CPU) == "Triton is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert "TRITON_INTERPRET=1" in vocab_peers.lacks(vocab_peers.PEERS["liger"], CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert vocab_peers.lacks(vocab_peers.PEERS["liger"], CPU) == ""


def lines(path):
    """Section -> what -> line."""
    found = {}
    for line in json.loads(path.read_text())["lines"]:
        found.setdefault(line["group"], {})[line["what"]] = line
    return found


def values(path, section):
    return values_of(json.loads(path.read_text()), section)


def test_a_peer_that_fails_is_its_own_section_and_the_others_take_turns(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setitem(vocab_peers.PEERS, "trl", vocab_peers.Peer(scores=broken, about="it fails"))
    report = Report(tmp_path / "a.json", {})
    peer_heads.output_layer(report, SMALL.heads[0], SMALL, ("fused", "torch_chunked", "trl"))
    found = lines(tmp_path / "a.json")
    assert found["small: trl"][WHOLE]["measured"] == "RuntimeError: no kernel image is available"
    assert found["small: in turns"][WHOLE]["status"] == "passed"
    figures = values(tmp_path / "a.json", "small: in turns")
    assert figures["who"] == "fused, torch_chunked"
    assert figures["share of cuBLAS's rate, forward and backward, fused"] > 0
    errors = values(tmp_path / "a.json", "small: fused")
    assert errors["largest error of log-prob"] < 1e-5
    assert errors["relative error of the gradient of weight"] < 1e-5


def test_layers_that_cannot_be_run_here_cost_nothing(tmp_path):
    peer_heads.output_layer(Report(tmp_path / "a.json", {}), SMALL.heads[0], SMALL, peer_heads.MAY_HANG)
    assert [one[WHOLE]["status"] for one in lines(tmp_path / "a.json").values()] == ["not here", "not here"]


def row(seconds, run_s=10.0):
    stages = {f"{name}_s": seconds / 5 for name in ("rollout", "score", "update", "weight_sync", "rest")}
    return stages | {"step_s": seconds, "tokens": 256.0, "run_s": run_s}


@pytest.fixture
def large(monkeypatch):
    """Arms of a GPU on this machine, whose runs are told and not run."""
    calls = []
    runs = {"ours": lambda: row(2.0), "trl": lambda: row(4.0)}
    monkeypatch.setattr(peer_steps, "missing", lambda: "")
    monkeypatch.setattr(peer_steps, "GPU_ARMS", ("ours", "trl"))
    monkeypatch.setattr(peer_steps, "LAST_ARMS", ())

    def run_arm(arm, shared, limit_s):
        calls.append((arm, limit_s))
        return runs[arm]()

    monkeypatch.setattr(peer_steps, "run_arm", run_arm)
    monkeypatch.setitem(SIZES, "0.5b", SIZES["tiny"])
    return calls, runs


def test_steps_take_turns_and_a_run_that_fails_leaves_the_other(tmp_path, large):
    calls, runs = large
    sizes = sizes_of(CPU, small=False)
    path = tmp_path / "a.json"
    peer_steps.steps(Report(path, {}), sizes, until=time.perf_counter() + 100)
    assert [arm for arm, _ in calls] == ["ours", "trl", "trl", "ours"]
    (last,) = [one for name, one in lines(path).items() if name.startswith("a step of")]
    assert last["whole step, trl"]["figures"] == {"value": 4.0, "runs": 2}
    assert last["whole step, trl"]["measured"] == "4 s"
    assert last["ours over TRL's, ours_over_trl"]["figures"]["value"] == 0.5

    def fails():
        raise RuntimeError("benchmarks.peer_worker ended with 1: no such model\nits log")

    runs["trl"] = fails
    peer_steps.steps(Report(path, {}), sizes, until=time.perf_counter() + 100)
    found = lines(path)
    assert found["run 2 of 4: trl"][WHOLE]["measured"].endswith("ended with 1: no such model")
    assert "its log" in found["run 2 of 4: trl"][WHOLE]["detail"]
    assert found["run 4 of 4: ours"][WHOLE]["status"] == "passed"


def test_no_run_is_begun_that_has_no_time(tmp_path, large):
    calls, _ = large
    path = tmp_path / "a.json"
    peer_steps.steps(Report(path, {}), sizes_of(CPU, small=False), until=time.perf_counter() + 5)
    assert [arm for arm, _ in calls] == ["ours"]
    assert calls[0][1] <= 5
    told = lines(path)["run 2 of 4: trl"][WHOLE]["measured"]
    assert told.endswith("s are left, and this run would take some 10")


def test_what_a_step_lacks_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("vllm", "ray") else object())
    peer_steps.steps(Report(tmp_path / "a.json", {}), SMALL, until=time.perf_counter() + 100)
    assert lines(tmp_path / "a.json")["a step beside TRL's"][WHOLE]["measured"] == "vllm and ray not installed"


@pytest.mark.slow
def test_a_process_that_fails_or_takes_too_long_shows_the_end_of_its_log(tmp_path):
    log = tmp_path / "a.log"
    command = [sys.executable, "-u", "-c", "print('one'); import sys; sys.exit('no weights')"]
    with pytest.raises(RuntimeError, match="ended with 1: no weights\none\nno weights"):
        peer_step.run(command, log, {})
    with pytest.raises(RuntimeError, match="took longer than 8 s: begun"):
        peer_step.run([sys.executable, "-u", "-c", "import time; print('begun'); time.sleep(60)"], log, {}, 8.0)
    peer_step.run([sys.executable, "-c", "import os; assert os.environ['GIVEN']"], log, {"GIVEN": "1"})


def test_a_step_of_trl_is_what_it_prepares_and_the_update():
    watch = peer_worker.Stopwatch("cpu")
    generate = watch.timed("rollout_s", lambda: time.sleep(0.02))
    prepare = watch.timed("prepare_s", lambda: (generate(), time.sleep(0.01)))
    watch.mark()
    for _ in range(2):
        for _ in range(3):
            prepare()
        watch.add("tokens", 5.0)
        time.sleep(0.04)
        watch.mark()
    assert watch.steps["tokens"] == [5.0, 5.0]
    for stage, least in (("rollout_s", 0.06), ("update_s", 0.04), ("step_s", 0.13)):
        assert len(watch.steps[stage]) == 2
        assert min(watch.steps[stage]) >= least
    assert watch.steps["score_s"] == [0.0, 0.0]


def test_the_run_on_a_gpu_is_one_that_its_recipe_takes(tmp_path):
    size = SIZES["0.5b"]
    shared = peer_step.Bench(
        size=size, device="cuda", steps=6, model=tmp_path / "model", scratch=tmp_path, environment={}
    )
    command = peer_step.our_command(shared, tmp_path / "run", "rollout", "bfloat16")
    config = parse("train", TrainOptions, command[command.index("train") + 1 :]).config
    assert config.rollout.placement == "colocated"
    assert (config.model.dtype, config.rollout.dtype) == ("bfloat16", "bfloat16")
    assert config.data.prompts_per_step * config.rollout.group_size == size.responses
    assert config.rollout.entropy_source == "rollout"
    assert size.responses % size.peer_batch == 0


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_finds_the_plugin_in_its_folder(tmp_path):
    """In any process whose ``PYTHONPATH`` has it."""
    eager_vllm.install(tmp_path)
    text = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins(); from benchmarks import eager_vllm; eager_vllm.apply()\n"
        "one = EngineArgs.create_engine_config\n"
        "assert one.is_eager\n"
        "assert one is EngineArgs.create_engine_config\n"
    )
    path = os.pathsep.join([str(tmp_path), str(peer_step.ROOT)])
    peer_step.run([sys.executable, "-c", text], tmp_path / "log", {"PYTHONPATH": path})


@pytest.mark.nightly
@pytest.mark.megatron
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_part_with_small_sizes(tmp_path):
    """Libraries that are not installed are skipped, and a step beside TRL's with them."""
    status = runner.main(["--output", str(tmp_path), "--device", "cpu", "--small", "--part", "peers"])
    told = (tmp_path / "gpu_proof.md").read_text()
    assert status == 0, told
    found = lines(tmp_path / "peers.json")
    assert found["small: fused"][WHOLE]["status"] == "passed"
    assert found["small: cut_cross_entropy"][WHOLE]["status"] == "not here"
    if not peer_steps.missing():
        figures = found["a step of 16 responses of 16 tokens"].keys()
        assert {"whole step, ours", "scoring, trl", "push, ours", "ours over TRL's, ours_over_trl"} <= figures

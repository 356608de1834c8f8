"""Judges on a real vLLM server: a chat model that is killed in mid-step and started again, and a reward model."""

import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing, suppress

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from gtpo_megatron.config.reward import JudgeConfig, RewardConfig
from gtpo_megatron.judge.check import check_judge
from gtpo_megatron.judge.store import STORE_FILE
from gtpo_megatron.orchestration.stages.grading import reward_batch
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool
from recipes.tiny_cpu import ASSETS
from tests.integration.runs import LEAVINGS, shared_memory_of

pytestmark = [
    LEAVINGS,
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

TINY = ASSETS / "tiny_qwen2"
START_S = 300.0
MAX_TOKENS = 64
TEMPLATE = "Compute {response}. Put the answer in \\boxed{}."
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Server:
    """``vllm serve`` of a folder on a port of this machine."""

    def __init__(self, folder, log, *options):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._log = log
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        self._command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", *options]
        self._process = None

    def start(self):
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True
            )

    def wait(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/models", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"no server within {START_S} s: {self._log.read_text()[-3000:]}")

    def kill(self):
        """It and all of its workers, at once; and what they leave in shared memory, which nobody else removes."""
        if self._process is None:
            return
        children = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        left = shared_memory_of(process.pid for process in (self._process, *children))
        self._process.kill()
        self._process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=30)
        for path in left:
            path.unlink(missing_ok=True)


@pytest.fixture
def served(tmp_path):
    servers = []

    def serve(folder, *options):
        servers.append(Server(folder, tmp_path / f"server{len(servers)}.log", *options))
        servers[-1].start()
        servers[-1].wait()
        return servers[-1]

    yield serve
    for server in servers:
        server.kill()


def sums():
    lines = (ASSETS / "arithmetic" / "heldout.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"][0]["content"] for line in lines[:40]]
    return [prompt.removeprefix("Compute ").split(".")[0] for prompt in prompts]


def greedy(questions):
    """What ``transformers`` answers with temperature 0."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            ids = model.generate(**prompt, do_sample=False, max_new_tokens=MAX_TOKENS)
        yield tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_judge_that_is_killed_in_mid_step_and_started_again_judges_every_response(served, tmp_path):
    """The tiny model knows sums only, so a response is a sum, and its score is what the model says it is."""
    server = served(TINY)
    judge = JudgeConfig(
        url=server.url,
        template=TEMPLATE,
        max_retries=60,
        score_pattern=r"boxed\{(\d+)\}",
        full_score=1000.0,
        max_tokens=MAX_TOKENS,
    )
    check_judge(judge)
    config = RewardConfig(
        function="gtpo_megatron.rewards.judge:judge", timeout_s=400.0, rows_per_call=1, num_workers=2, judge=judge
    )
    responses = sums()
    found = []
    with RewardPool(config, folder=tmp_path) as pool:
        requests = [RewardRequest(response=one) for one in responses]
        step = threading.Thread(target=lambda: found.append(reward_batch(pool.grade(requests))))
        step.start()
        wait_until(lambda: num_answers(tmp_path) >= 5)
        server.kill()
        num_before = num_answers(tmp_path)
        server.start()
        step.join(400.0)
        num_after = num_answers(tmp_path)
        server.kill()
        again = reward_batch(pool.grade(requests))
    assert num_before < len(responses)
    [batch] = found
    answers = list(greedy(TEMPLATE.replace("{response}", one) for one in responses))
    boxed = [re.findall(judge.score_pattern, answer) for answer in answers]
    assert batch.failed.tolist() == [not one for one in boxed]
    assert not batch.failed.all()
    expected = [float(one[-1]) / 1000 if one else 0.0 for one in boxed]
    assert batch.rewards.tolist() == pytest.approx(expected)
    assert again.rewards.tolist() == batch.rewards.tolist()
    assert num_after == len(set(responses)), "what is known is not asked again: nobody could answer"


def num_answers(folder):
    with closing(sqlite3.connect(folder / STORE_FILE)) as database:
        return database.execute("SELECT count(*) FROM answers").fetchone()[0]


def wait_until(is_done, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_reward_model_gives_the_scores_of_transformers(served, tmp_path):
    """Of a Qwen2 with a head for one label, such as published ones have."""
    torch.manual_seed(3)
    shape = Qwen2Config.from_pretrained(TINY)
    shape.num_labels, shape.pad_token_id = 1, 0
    model = Qwen2ForSequenceClassification(shape).float().eval()
    folder = tmp_path / "reward_model"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    server = served(folder, "--runner", "pooling")
    config = RewardConfig(
        function="gtpo_megatron.rewards.judge:reward_model",
        timeout_s=100.0,
        num_workers=1,
        judge=JudgeConfig(url=server.url),
    )
    responses = ["7", "28", "I do not know", "\\boxed{7}"]
    with RewardPool(config, folder=tmp_path) as pool:
        batch = reward_batch(pool.grade([RewardRequest(response=one, prompt="Compute 3+4.") for one in responses]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    for one in responses:
        chat = [{"role": "user", "content": "Compute 3+4."}, {"role": "assistant", "content": one}]
        with torch.no_grad():
            inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
            expected.append(model(**inputs).logits.item())
    assert batch.rewards.tolist() == pytest.approx(expected, abs=1e-4)
    assert len(set(expected)) == len(responses)

"""What a report costs: seconds to make, bytes, and the first paint in headless Chromium, at 200 steps and 64 groups.

    python -m benchmarks.report --output benchmarks/results/report.json

The run folder is written by the writers that training uses. Its responses are as long as asked, so that the cutting of
long ones is measured too: 64 groups of 16 responses of 1,024 tokens by default, far more than a page can hold.
First paint is the browser's own ``first-contentful-paint``, counted from the start of the navigation; every figure is
drawn a little later, which is reported too. The median of several fresh starts.
"""

import base64
import json
import math
import platform
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from gtpo_megatron.companions.report.page import write_report
from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.config.serialize import to_plain, to_yaml
from gtpo_megatron.observability.sinks import open_sinks
from gtpo_megatron.run_folder.rollout_log import RolloutLog, RolloutRecord
from recipes.tiny_cpu import gtpo

TARGETS = {"make_s": 10.0, "page_mib": 8.0, "first_paint_s": 2.0}
"""Upper bounds."""
MIB = 1 << 20
MAX_STARTS = 5
"""The browser sometimes leaves before it has told the time of its first paint."""
WORDS = ("Start", " with", " so", "Next", "=", "+", "1", "2", "7", " leaving", ".\n", "Result", ":", " \\boxed{", "}")

PROBE = """<!doctype html><iframe src="report.html" style="width:1280px;height:900px;border:0"></iframe><script>
const wait = setInterval(() => {
  const frame = document.querySelector("iframe");
  if (!frame.contentDocument.body?.dataset.drawn) return;
  clearInterval(wait);
  const at = frame.contentWindow.performance;
  const paint = at.getEntriesByName("first-contentful-paint")[0];
  document.title = `paint=${paint ? paint.startTime : "none"} drawn=${at.now()}`;
}, 20);</script>"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write; empty: standard output only.
        steps: of the run.
        groups: sampled groups, in the last step's file and spread over the others.
        group_size: responses a group.
        response_tokens: of the longest response.
        rounds: browser starts, and times that the page is made.
    """

    output: str = ""
    steps: int = 200
    groups: int = 64
    group_size: int = 16
    response_tokens: int = 1024
    rounds: int = 5


def write_run(folder: Path, options: Options) -> None:
    """A run folder as training leaves it, with every metric that a report draws."""
    config = gtpo(num_steps=options.steps)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    rng = random.Random(0)
    with open_sinks(folder, LoggingConfig(), run_config=to_plain(config)) as sinks:
        for step in range(options.steps + 1):
            sinks.write(step, scalars(step, rng))
    log = RolloutLog(folder, groups_per_step=2)
    for step in range(1, options.steps + 1, max(1, 2 * options.steps // options.groups)):
        log.write(step, [record(2 * step + k % 2, options, rng) for k in range(2 * options.group_size)])


def scalars(step: int, rng: random.Random) -> dict[str, float]:
    """Noisy curves under the names of docs/metrics.md."""
    rise = 1 - math.exp(-step / 80)
    values = {
        "rollout/reward_mean": 0.2 + 0.5 * rise,
        "rollout/best_of_group_reward_mean": 0.5 + 0.4 * rise,
        "rollout/reward_best_32_mean": 0.9,
        "rollout/reward_best_16_mean": 1.0,
        "rollout/response_length_tokens": 300 + 200 * rise,
        "rollout/response_length_max_tokens": 1024.0,
        "rollout/groups_mixed_frac": 0.7,
        "rollout/truncated_frac": 0.05,
        "credit/one_sided_groups_frac": 0.3,
        "credit/correct_tokens_negative_frac": 0.1,
        "credit/incorrect_tokens_positive_frac": 0.1,
        "credit/effective_frac_correct": 0.6,
        "credit/effective_frac_incorrect": 0.4,
        "credit/entropy_correct_nats": 0.3,
        "credit/entropy_incorrect_nats": 0.4,
        "policy/entropy_nats": 0.35,
        "policy/clip_frac": 0.02,
        "policy/clip_frac_low": 0.01,
        "policy/clip_frac_high": 0.01,
        "policy/ratio_mean": 1.0,
        "policy/kl_old_nats": 1e-3,
        "off_policy/ratio_mean": 1.0,
        "off_policy/kl_nats": 1e-7,
        "optimizer/grad_norm": 0.2,
        "optimizer/learning_rate": 1e-6,
        "rollout/response_tokens_count": 100_000.0,
        "rollout/trained_tokens_count": 80_000.0,
        "sync/logprob_gap_max": 3e-5,
        "sync/logprob_gap_mean": 1e-6,
        "throughput/tokens_per_s": 2000.0,
        "throughput/score_tokens_per_s": 30_000.0,
        "throughput/update_tokens_per_s": 9000.0,
        "memory/peak_gib": 4.0,
        "timing/step_s": 8.0,
    }
    stages = {"rollout": 2.8, "reward": 0.1, "score": 1.1, "credit": 0.03, "update": 3.8, "weight_sync": 0.05}
    values |= {f"timing/{stage}_s": seconds for stage, seconds in stages.items()}
    values |= {f"memory/{stage}_peak_gib": 3.5 for stage in stages}
    noisy = {name: value * rng.uniform(0.9, 1.1) for name, value in values.items()}
    if step % 20 == 0:
        mean = 0.2 + 0.3 * rise
        noisy |= {
            "eval/heldout_mean_at_k": mean,
            "eval/heldout_interval_low": mean - 0.03,
            "eval/heldout_interval_high": mean + 0.03,
            "eval/heldout_best_at_32": min(1.0, mean + 0.4),
            "eval/heldout_best_at_16": min(1.0, mean + 0.35),
        }
    return noisy


def record(label: int, options: Options, rng: random.Random) -> RolloutRecord:
    """One response with numbers of all magnitudes."""
    reward = float(rng.random() < 0.4)
    length = rng.randint(options.response_tokens // 2, options.response_tokens)
    tokens = rng.choices(WORDS, k=length)
    sign = 1 if reward else -1
    return RolloutRecord(
        group_id=label,
        policy_version=0,
        prompt="Compute 14+6*8. Put the answer in \\boxed{}.",
        response="".join(tokens),
        tokens=tokens,
        token_entropy=[rng.expovariate(3) * 10 ** -rng.choice((0, 0, 1, 4)) for _ in range(length)],
        shaped_rewards=[sign * (1 + 0.1 * rng.expovariate(1)) for _ in range(length)],
        advantages=[sign * rng.uniform(0.5, 1.5) for _ in range(length)],
        reward=reward,
        truncated=length == options.response_tokens,
        answer="62",
    )


def browse(folder: Path, browser: str) -> tuple[float, float]:
    """Seconds to the first paint and to the last figure, of one fresh start.

    Raises:
        SystemExit: the browser did not say.
    """
    (folder / "probe.html").write_text(PROBE, encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={folder / 'profile'}", "--timeout=20000", "--dump-dom", f"file://{folder}/probe.html"]
    for _ in range(MAX_STARTS):
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
        found = re.search(r"<title>paint=([\d.]+) drawn=([\d.]+)", done.stdout)
        if found is not None:
            return float(found.group(1)) / 1000, float(found.group(2)) / 1000
    raise SystemExit(f"the browser did not draw the report: {done.stderr[-2000:]}")


def measure(options: Options) -> dict[str, Any]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium on the path; Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, options)
        page = folder / "report.html"
        made = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            write_report([folder], page)
            made.append(time.perf_counter() - start)
        seen = [browse(folder, browser) for _ in range(options.rounds)]
        data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)[1])  # type: ignore[index]
        return {
            "make_s": max(made),
            "page_mib": page.stat().st_size / MIB,
            "first_paint_s": statistics.median(paint for paint, _ in seen),
            "all_drawn_s": statistics.median(drawn for _, drawn in seen),
            "groups_on_page": len(data["runs"][0]["groups"]),
            "tokens_of_a_response_on_page": max(
                len(base64.b64decode(each["tokens"])) // 2
                for group in data["runs"][0]["groups"]
                for each in group["responses"]
            ),
        }


def main() -> None:
    """Measures, prints, and writes the JSON file."""
    options = tyro.cli(Options, description=__doc__)
    result = {
        "options": {key: value for key, value in asdict(options).items() if key != "output"},
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "targets": TARGETS,
        "tiny": measure(
            Options(steps=options.steps, groups=options.groups, group_size=8, response_tokens=64, rounds=options.rounds)
        ),
        "long": measure(options),
    }
    for name in ("tiny", "long"):
        for key, value in result[name].items():
            bound = f"   (at most {TARGETS[key]:g})" if key in TARGETS else ""
            print(f"{name:5s} {key:30s} {value:9.3f}{bound}")
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

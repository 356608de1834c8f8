"""Speed and memory of tools/convert_checkpoint.py, beside a plain copy of the same shards.

    python benchmarks/conversion.py --json result.json              # eight shards of 250 MB, bfloat16
    python benchmarks/conversion.py --folder /big/disk --rounds 5

Every round copies the shards file by file to the same disk, flushed to it, then converts them to a Megatron checkpoint
and back, each in a process of its own; a ratio is the median over rounds of the ratio within a round, so that a machine
with neighbours does not favour one of them. A conversion's time is taken inside its process, after the imports; its
memory is the peak of the resident set less what the imports took.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.hf.writer import plan_shards, write_shards
from gtpo_megatron.weights.reshard import hf_shapes

MB = 10**6

CHILD = """
import json, sys, time
from pathlib import Path
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.conversion import hf_to_megatron, megatron_to_hf
import torch.distributed.checkpoint.filesystem
class Quiet:
    def start(self, num_bytes): pass
    def advance(self, num_bytes): pass
def status(key):
    return next(int(row.split()[1]) * 1024 for row in open("/proc/self/status") if row.startswith(key))
direction, source, target, tp, pp, shard_bytes = sys.argv[1:]
open("/proc/self/clear_refs", "w").write("5")  # sets the peak to what is resident now
baseline, start, cpu = status("VmRSS"), time.perf_counter(), time.process_time()
if direction == "hf_to_megatron":
    layout = ParallelConfig(
        num_ranks=int(tp) * int(pp), tensor_parallel_size=int(tp), pipeline_parallel_size=int(pp)
    )
    hf_to_megatron(Path(source), Path(target), layout, progress=Quiet())
else:
    megatron_to_hf(
        Path(source, "megatron"), Path(source), Path(target), progress=Quiet(), shard_bytes=int(shard_bytes)
    )
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": status("VmHWM") - baseline}))
"""


def make_model(folder: Path, *, num_shards: int, shard_bytes: int) -> None:
    """A Llama of random bits that fills so many shards, as nearly as whole tensors do."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 4 * num_shards,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 15000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
        "intermediate_size": 128,
    }
    folder.mkdir(parents=True)
    sizes: dict[str, int] = {}
    while True:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        shapes = hf_shapes(read_architecture(folder))
        found = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
        if len(plan_shards(found, shard_bytes)) > num_shards:
            break
        sizes, config["intermediate_size"] = found, config["intermediate_size"] + 128
    config["intermediate_size"] -= 128
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = hf_shapes(read_architecture(folder))
    generator = torch.Generator().manual_seed(0)

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        bits = {name: torch.randint(0, 2**15, shapes[name], dtype=torch.int16, generator=generator) for name in names}
        return {name: tensor.view(torch.bfloat16) for name, tensor in bits.items()}

    write_shards(folder, sizes, read, shard_bytes=shard_bytes)


def copy_shards(source: Path, target: Path) -> float:
    """Seconds to copy every file and flush it to the disk."""
    target.mkdir()
    start = time.perf_counter()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def convert(direction: str, source: Path, target: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One conversion in a process of its own."""
    layout = [str(arguments.tensor_parallel_size), str(arguments.pipeline_parallel_size)]
    command = [sys.executable, "-c", CHILD, direction, str(source), str(target), *layout]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    output = subprocess.run(
        [*command, str(arguments.shard_mb * MB)], check=True, capture_output=True, text=True, env=environment
    )
    return json.loads(output.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; needs four times the model")
    parser.add_argument("--num-shards", type=int, default=8)
    parser.add_argument("--shard-mb", type=int, default=250)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        base = Path(scratch)
        make_model(base / "hf", num_shards=arguments.num_shards, shard_bytes=arguments.shard_mb * MB)
        shards = sorted((base / "hf").glob("*.safetensors"))
        num_bytes = sum(path.stat().st_size for path in shards)
        copy_shards(base / "hf", base / "warm")  # the source is in the page cache for all alike
        rounds = []
        for _ in range(arguments.rounds):
            found: dict[str, dict[str, float]] = {"copy": {"seconds": copy_shards(base / "hf", base / "copy")}}
            shutil.rmtree(base / "copy")
            found["hf_to_megatron"] = convert("hf_to_megatron", base / "hf", base / "converted", arguments)
            found["megatron_to_hf"] = convert("megatron_to_hf", base / "converted", base / "back", arguments)
            for path in shards:
                assert (base / "back" / path.name).read_bytes() == path.read_bytes(), f"{path.name} came back changed"
            shutil.rmtree(base / "converted")
            shutil.rmtree(base / "back")
            rounds.append(found)
            print(json.dumps(found))
    report = {
        "shards": len(shards),
        "model_mb": num_bytes / MB,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "pipeline_parallel_size": arguments.pipeline_parallel_size,
        "copy_mb_per_s": statistics.median(num_bytes / MB / r["copy"]["seconds"] for r in rounds),
        **{
            direction: {
                "mb_per_s": statistics.median(num_bytes / MB / r[direction]["seconds"] for r in rounds),
                "share_of_copy_speed": statistics.median(
                    r["copy"]["seconds"] / r[direction]["seconds"] for r in rounds
                ),
                "peak_mb_above_imports": max(r[direction]["peak_bytes"] for r in rounds) / MB,
            }
            for direction in ("hf_to_megatron", "megatron_to_hf")
        },
        "rounds": rounds,
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__},
    }
    print(json.dumps({key: value for key, value in report.items() if key != "rounds"}, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

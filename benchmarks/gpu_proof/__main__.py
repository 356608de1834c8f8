"""Proves on one GPU what a CPU cannot, in parts; or packs what such a machine needs. See docs/gpu_proof.md.

    tools/gpu_proof.sh --output proof                        # all parts, on a GPU
    tools/gpu_proof.sh --output proof --part kernels         # one; what other parts have found there is kept
    tools/gpu_proof.sh --output proof --device cpu --small   # the same code without a GPU
    tools/gpu_proof.sh pack gpu_proof.tar.gz                 # where there is a package index: for where there is none

Each part is a process of its own with a time limit. FOLDER/gpu_proof.json, .md and .html are written anew
after every part. The exit status is 0 if every part passed, 1 if one did not.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof import archives, wheels
from benchmarks.gpu_proof.catalogue import PARTS, Part
from benchmarks.gpu_proof.needs import GROUPS
from benchmarks.gpu_proof.page import facts_of, markdown, results_of
from gtpo_megatron.companions.preflight.page import Report, write_json, write_page

INTERRUPTED = {"status": "cut off", "reason": "when its call was interrupted", "seconds": 0.0}
"""Of a part whose runner did not see its end."""

NOTHING: dict[str, Any] = {"facts": {}, "under_way": "", "lines": []}
"""Of a part that has measured nothing."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/gpu_proof.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_proof"), metavar="FOLDER", help="default: gpu_proof")
    parser.add_argument(
        "--part", action="append", choices=[part.name for part in PARTS], help="may be repeated; default: all"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes in seconds")
    parser.add_argument("--limit", type=float, help="seconds that a part may take, instead of its own limit")
    parser.add_argument("verb", nargs="?", choices=["run", "pack"], default="run")
    packing = parser.add_argument_group("pack")
    packing.add_argument("file", nargs="?", type=Path, default=Path("gpu_proof.tar.gz"), help="FILE.1.tar.gz and so on")
    packing.add_argument("--archive-mib", type=int, default=64, help="of an archive at most; default: 64")
    packing.add_argument("--there", type=Path, metavar="FILE", help="what that machine has: pip list --format=freeze")
    packing.add_argument("--group", action="append", choices=list(GROUPS), help="may be repeated; default: all")
    packing.add_argument("--instead", action="append", default=[], metavar="NAME==VERSION", help="of what is packed")
    chosen = parser.parse_args(arguments)
    return _pack(chosen) if chosen.verb == "pack" else _run(chosen)


def _pack(chosen: argparse.Namespace) -> int:
    groups = ["base", *(name for name in GROUPS if name != "base" and name in (chosen.group or GROUPS))]
    try:
        there = chosen.there.read_text(encoding="utf-8").split() if chosen.there else []
        made = archives.pack(
            chosen.file, limit=chosen.archive_mib << 20, groups=groups, there=there, replaced=chosen.instead
        )
    except (archives.ArchiveError, wheels.WheelError, OSError) as error:
        print(f"gpu_proof: {error}", file=sys.stderr)
        return 1
    for path, held in made.items():
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, {', '.join(held)}")
    return 0


def _run(chosen: argparse.Namespace) -> int:
    folder: Path = chosen.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names = chosen.part or [part.name for part in PARTS]
    by_name = {part.name: part for part in PARTS}
    parts = [by_name[name] for name in names]
    folders, lacking = _arrived(parts)
    environment = _environment(chosen, folders)
    for part in parts:
        print(f"{part.name}:", flush=True)
        reason = next((lacking[one] for one in ("base", *part.needs) if one in lacking), "")
        output = folder / f"{part.name}.json"
        if reason and output.exists():
            print(f"{part.name}: not run: {reason}; what an earlier call has found is kept", flush=True)
            continue
        outcome = {"status": "not run", "reason": reason, "seconds": 0.0}
        result = NOTHING | outcome if reason else _part(part, folder, chosen, environment)
        write_json(output, result)
        shown = f": {result['reason']}" if result["reason"] else ""
        print(f"{part.name}: {result['status']} in {result['seconds']:.0f} s{shown}", flush=True)
        _write(folder)
    results = _results(folder)
    print(f"{folder / 'gpu_proof.md'} has the table, gpu_proof.html is the page, gpu_proof.json the same as JSON")
    return 0 if not lacking and all(results[name]["status"] in ("passed", "skipped") for name in names) else 1


def _write(folder: Path) -> None:
    """The results of all parts that were ever run into this folder: JSON, table and page."""
    results = _results(folder)
    write_json(folder / "gpu_proof.json", results)
    (folder / "gpu_proof.md").write_text(markdown(results), encoding="utf-8")
    facts = facts_of(results)
    report = Report(
        command="GPU proof",
        title=facts.get("device", "no part has begun"),
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=sum(part["seconds"] for part in results.values()),
        facts={
            "parts": list(results),
            "versions": [f"{name} {version}" for name, version in facts.get("versions", {}).items()],
        },
        results=results_of(results),
    )
    write_page(folder / "gpu_proof.html", report)


def _arrived(parts: Sequence[Part]) -> tuple[list[Path], dict[str, str]]:
    """Folders of what was unpacked for these parts, and why groups of distributions are not there."""
    folders, lacking = [], {}
    groups = dict.fromkeys(["base", *(group for part in parts for group in part.needs)])
    listed = archives.listed()
    for group in groups:
        if group not in listed:
            continue  # nothing was packed: what is installed is used
        if missing := archives.missing(listed[group]):
            lacking[group] = f"{' and '.join(missing)} not unpacked here, which {group} needs"
            continue
        try:
            folder, added = archives.unpack(listed[group])
        except archives.ArchiveError as error:
            lacking[group] = str(error)
            continue
        folders.append(folder)
        print(f"{group}, unpacked for want of them: {', '.join(added) or 'nothing'}", flush=True)
    for reason in lacking.values():
        print(reason, flush=True)
    return folders, lacking


def _environment(chosen: argparse.Namespace, folders: Sequence[Path]) -> dict[str, str]:
    """Of the parts: this repository and what was unpacked are on their module path, nothing is fetched."""
    path = [str(wheels.ROOT), *map(str, folders), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    # on one machine NCCL and gloo need no other interface
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    if chosen.device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return environment


def _part(part: Part, folder: Path, chosen: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a part; returns what it has measured, however it ended."""
    output, limit = folder / f"{part.name}.json", chosen.limit or part.limit_s
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_proof.part", part.name, "--device", chosen.device]
    command += ["--output", str(output), *(["--small"] if chosen.small else [])]
    began = time.perf_counter()
    with (folder / f"{part.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=wheels.ROOT, env=dict(environment), stderr=log, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    found = json.loads(output.read_text(encoding="utf-8")) if output.exists() else NOTHING
    status, reason = _verdict(found, code, limit, (folder / f"{part.name}.log").read_text(encoding="utf-8"))
    return {**found, "status": status, "reason": reason, "seconds": round(time.perf_counter() - began, 1)}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the part and every process that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _verdict(found: Mapping[str, Any], code: int | None, limit: float, log: str) -> tuple[str, str]:
    """Status of a part and its reason.

    Args:
        found: the part's own file.
        code: exit status; None if its time was up.
        limit: seconds that it had.
        log: standard error.
    """
    lines, section = found["lines"], found["under_way"]
    if code is None:
        where = section or (lines[-1]["group"] if lines else "its start")
        return "cut off", f"after {limit:g} s, in {where}; what was measured before is kept"
    failed = list(dict.fromkeys(line["group"] for line in lines if line["status"] == "failed"))
    if code and not failed:
        last = [line for line in log.strip().splitlines() if line.strip()] or ["it said nothing"]
        return "failed", f"ended with {code}: {last[-1][:300]}"
    if failed or section:
        return "failed", "; ".join([*failed, *filter(None, [section])])
    if lines and all(line["status"] == "not here" for line in lines):
        return "skipped", lines[0]["measured"]
    return "passed", ""


def _results(folder: Path) -> dict[str, Any]:
    """Of all parts that were ever run into this folder."""
    files = {part.name: folder / f"{part.name}.json" for part in PARTS}
    return {
        name: INTERRUPTED | json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.exists()
    }


if __name__ == "__main__":
    raise SystemExit(main())

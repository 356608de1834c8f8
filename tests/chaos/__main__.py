"""``python -m tests.chaos --minutes 30``: a table, and the same as JSON."""

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path

from tests.chaos.campaign import Campaign, Case, summary
from tests.chaos.faults import draw_faults

ENGINE_OPTIONS = ("--rollout.tensor-parallel-size", "2")
"""An engine with workers has more to kill and more to leave behind."""


def _burn() -> None:
    while True:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", type=int, default=1000, help="at most")
    parser.add_argument("--first", type=int, default=0, help="of the faults that the seed gives; to go on later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--faults-per-run", type=int, default=8)
    parser.add_argument("--load", type=int, default=0, help="processes that do nothing but keep a core busy")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--only", default="", help="kinds of processes, separated by commas")
    options = parser.parse_args()
    deadline = time.monotonic() + options.minutes * 60
    burners = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(options.load)]
    for burner in burners:
        burner.start()
    campaign = Campaign(
        options.folder, num_steps=options.num_steps, options=ENGINE_OPTIONS, say=lambda line: print(line, flush=True)
    )
    campaign.prepare()
    faults = draw_faults(options.seed, options.first + options.faults)[options.first :]
    if options.only:
        faults = [fault for fault in faults if fault.kind in options.only.split(",")]
    cases: list[Case] = []
    file = options.folder / f"chaos_{options.seed}_{options.first}.json"
    while faults and time.monotonic() < deadline:
        done = campaign.attack(faults[: options.faults_per_run], deadline=deadline)
        cases += done
        faults = faults[max(1, len(done)) :]
        file.write_text(json.dumps(summary(cases), indent=1), encoding="utf-8")
    figures = summary(cases)
    print(json.dumps({name: value for name, value in figures.items() if name != "cases"}, indent=1))
    print(f"all cases: {file}")
    return 0 if all(case.is_good() for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())

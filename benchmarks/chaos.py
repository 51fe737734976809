"""Summarizes `make chaos`: the processes that were lost, how and in which phase, and the outcome.

    MOTET_CHAOS_LOG=chaos.jsonl make chaos        # 200 trials; may be split by MOTET_CHAOS_FIRST and MOTET_CHAOS_TRIALS
    python -m benchmarks.chaos chaos.jsonl

How soon losses are noticed is seen with the usual `detect_s`, on a quiet machine:

    MOTET_CHAOS_DETECT_S=1 MOTET_CHAOS_TRIALS=40 MOTET_CHAOS_LOG=detection.jsonl make chaos
    python -m benchmarks.chaos --name detection detection.jsonl

Losses beyond nodes and beyond what is tolerated have a log of their own (tests/resilience/test_wild_chaos.py):

    python -m benchmarks.chaos --wild wild.jsonl

A trial whose outcome was not as it must be ends `make chaos`, so it is not in the file.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.reporting import Report

HOW = {
    "process": "SIGKILL of a process",
    "agent": "SIGKILL of a node's agent, with its processes",
    "hang": "SIGSTOP of a process",
    "warning": "SIGTERM of an agent (a warning)",
    "cut": "link cut (network namespaces)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--name", default="chaos", help="of the report")
    parser.add_argument("--wild", action="store_true", help="logs of tests/resilience/test_wild_chaos.py")
    parser.add_argument("--note", default="", help="a sentence on the circumstances")
    arguments = parser.parse_args()
    trials = [json.loads(line) for path in arguments.logs for line in path.read_text().splitlines()]
    if arguments.wild:
        _report_wild(trials, "wild-chaos" if arguments.name == "chaos" else arguments.name, arguments.note)
        return
    report = Report(arguments.name, "Random losses at random moments")
    seeds = Counter(trial["seed"].rpartition("/")[0] for trial in trials)
    told = ", ".join(f"{number} of seed {seed}" for seed, number in seeds.items())
    worst = max(trial["max_loss_error"] for trial in trials)
    report.add(
        f"{len(trials)} trials ({told}), each a training of 4 to 10 processes. All ended, and in all of them: losses "
        f"within {worst:.1g} (relative) of the undisturbed run's; in every step the samples of the undisturbed run; "
        "no step begun again but an interrupted one; all replicas equal to the bit after every recovery; "
        "no node lost but those that were killed, no restart from a checkpoint."
    )
    losses = [loss for trial in trials for loss in trial["losses"]]
    seen = [how for how in HOW if any(loss["how"] == how for loss in losses)]
    report.table(("phase in which it was", *(HOW[how] for how in seen), "together"), _by_phase(losses, seen))
    report.table(("trials", "number"), [(what, number) for what, number in _kinds(trials).items()])
    detect_s = sorted({trial["detect_s"] for trial in trials})
    report.add(f"Noticed, with `detect_s` {' or '.join(f'{each:g}' for each in detect_s)}:")
    report.table(("lost by", "losses", "noticed after, median [s]", "longest [s]"), _noticed(losses, seen))
    times = [seconds for trial in trials for seconds in trial["recovery_s"]]
    report.add(
        f"{len(times)} recoveries, from when a process heard of the loss until all had what they need: median "
        f"{median(times):.2f} s, longest {max(times):.2f} s."
    )
    if lengths := [trial["seconds"] for trial in trials if "seconds" in trial]:
        report.add(f"A trial took {median(lengths):.0f} s (median), the longest {max(lengths):.0f} s.")
    report.write()


def _report_wild(trials: list[dict[str, Any]], name: str, note: str) -> None:
    report = Report(name, "Losses beyond nodes, and beyond what is tolerated")
    worst = max(trial["max_loss_error"] for trial in trials)
    report.add(
        f"{len(trials)} trials, each a training of 4 or 5 nodes of one process that tolerates one loss. In all of "
        f"them the losses were within {worst:.1g} (relative, float64) of the undisturbed run's, each step had the "
        "samples of the undisturbed run, and no process, descriptor, temporary file or segment of shared memory was "
        "left. Wherever nodes that were not lost had held each layer, and the store was not lost, training went on "
        "without a checkpoint."
    )
    if note:
        report.add(note)
    kinds: Counter[tuple[str, str]] = Counter()
    for trial in trials:
        hits = sorted(each.partition(" in ")[0] for each in trial["killed"])
        doubles = len(hits) == 2 and any(each.endswith("recovery") for each in trial["killed"])
        what = f"{' and '.join(hits) or 'nothing'}{', within one recovery' if doubles else ''}"
        kinds[f"{trial['trial']['store']}: {what}", "went on" if trial["went_on"] else "from a checkpoint"] += 1
    rows = [
        (what, kinds[what, "went on"], kinds[what, "from a checkpoint"]) for what in sorted({what for what, _ in kinds})
    ]
    report.table(("what was hit", "went on", "from a checkpoint"), rows)
    doubles = [trial for trial in trials if any(each.endswith("recovery") for each in trial["killed"])]
    alive = sum(trial["survives"] for trial in doubles)
    went_back = sum(not trial["went_on"] for trial in doubles)
    report.add(
        f"Two nodes within one recovery: {len(doubles)} trials. In {alive} of them each layer was alive on some node, "
        f"and all of these went on; {went_back} of the others went back to the last checkpoint."
    )
    phases = Counter(each.rpartition(" in ")[2] for trial in trials for each in trial["killed"])
    told = ", ".join(f"{phase} {number}" for phase, number in phases.most_common())
    report.add(f"Phase of the node that was drawn, also where a server or launcher was hit: {told}.")
    joins, workers = (sum(trial["trial"][key] for trial in trials) for key in ("joins", "has_workers"))
    joined = sum(trial["joined"] for trial in trials)
    report.add(
        f"A node that came after the first loss: {joins} trials. In {joined} of them it summed with a member and was "
        "counted in before the training was over; none was refused. Processes that prepare samples and hand them over "
        f"in shared memory: {workers} trials."
    )
    if starved := sum(trial.get("num_starved", 0) > 0 for trial in trials):
        report.add(f"In {starved} trials the machine was too busy for `detect_s`: nodes were lost that nobody hit.")
    report.write()


def _by_phase(losses: list[dict[str, Any]], seen: list[str]) -> list[tuple[object, ...]]:
    counts = Counter((loss["phase"], loss["how"]) for loss in losses)
    phases = sorted({loss["phase"] for loss in losses})
    rows = [(phase, *(counts[phase, how] for how in seen), sum(counts[phase, how] for how in seen)) for phase in phases]
    return [*rows, ("together", *(sum(counts[phase, how] for phase in phases) for how in seen), len(losses))]


def _noticed(losses: list[dict[str, Any]], seen: list[str]) -> list[tuple[object, ...]]:
    """From the loss until an agent proposed to go on without the node."""
    rows: list[tuple[object, ...]] = []
    for how in seen:
        of_kind = [loss for loss in losses if loss["how"] == how]
        times = [loss["noticed_s"] for loss in of_kind if loss.get("noticed_s") is not None]
        if times:
            rows.append((HOW[how], len(times), f"{median(times):.2f}", f"{max(times):.2f}"))
    return rows


def _kinds(trials: list[dict[str, Any]]) -> dict[str, int]:
    def number(is_so: Callable[[dict[str, Any]], bool]) -> int:
        return sum(map(is_so, trials))

    def number_that_did(step: str) -> int:
        return number(lambda trial: any(step in done for done in trial["done"]))

    return {
        "f = 1": number(lambda trial: trial["tolerate"] == 1),
        "f = 2": number(lambda trial: trial["tolerate"] == 2),
        "alike pipelines, broken ones left out": number(lambda trial: trial["layout"] == "alike"),
        "pipelines of replicas that share rows, broken ones left out": number(lambda trial: trial["layout"] == "rows"),
        "unlike pipelines, reconfigured": number(lambda trial: trial["layout"] == "unlike"),
        "the same, with unlike tensor parallelism": number(lambda trial: trial["layout"] == "shards"),
        "ZeRO-1: optimizer states kept by f + 1 pipelines of f + 2": number(lambda trial: trial.get("zero1", False)),
        "layers copied from peers": number(lambda trial: trial["moved_bytes"] > 0),
        "reconfigured by simple": number_that_did("simple"),
        "reconfigured by borrow": number_that_did("borrow"),
        "reconfigured by merge": number_that_did("merge"),
        "two losses": number(lambda trial: len(trial["losses"]) == 2),
        "two losses in one step": number(
            lambda trial: len(trial["losses"]) == 2 and len({loss["after_steps"] for loss in trial["losses"]}) == 1
        ),
        "node 0 lost (its first rank writes the logs)": number(
            lambda trial: any(loss["node"] == 0 for loss in trial["losses"])
        ),
        "no loss (nobody came into the phase)": number(lambda trial: not trial["losses"]),
    }


if __name__ == "__main__":
    main()

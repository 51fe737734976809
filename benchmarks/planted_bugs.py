"""Do the tests see bugs that are planted in the source, one at a time?

Each bug replaces one piece of source text by another, in a temporary copy of the checkout where only the tests named
with the bug run; they must pass there without the bug, which is tried first. The text is searched in all files below
src/motet and must be found exactly once; white space in it matches any white space. So neither code that moves to
another file or folder nor changed imports break a bug, but changed code does, and that is reported as an error. Tests
are named by the stems of their files, which may lie anywhere below tests/.

Exit code: 0 if every bug is caught, otherwise 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting import Report

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "examples", "docs", "papers", "pyproject.toml", "README.md", "CONTRIBUTING.md")


@dataclass(frozen=True)
class Bug:
    name: str
    anchor: str
    """Source text that stands once below src/motet."""
    replacement: str
    tests: tuple[str, ...]
    """Stems of the test files that should catch the bug."""
    keyword: str = ""
    """Expression for pytest's `-k` that selects tests of these files; empty: all."""


BUGS = (
    Bug(
        "the loss is divided by one token too many",
        "self._loss_weight / max(1, loss_tokens.get(self.data_module, 0))",
        "self._loss_weight / max(1, 1 + loss_tokens.get(self.data_module, 0))",
        ("test_engine",),
        "replicas_and_groups",
    ),
    Bug(
        "norms of a generator's queries and keys are not summed over its tensor-parallel group",
        "rows, entries = (down,), (attention, up)",
        'rows, entries = (down,), (*(f"{attention}.{name}" for name in COLUMNS[:3]), up)',
        ("test_verify_generators",),
        "in_stages_equals",
    ),
    Bug(
        "rows that routes bring are swapped",
        "tokens if order is None else tokens.index_select(0, to_device(order, tokens.device))",
        "(tokens if order is None else tokens.index_select(0, to_device(order, tokens.device))).flip(0)",
        ("test_engine",),
        "two_encoders and 1f1b",
    ),
    Bug(
        "the first run of layers is not reduced",
        "if module.is_trainable((first, last)):",
        "if first and module.is_trainable((first, last)):",
        ("test_dependencies",),
        "reduced",
    ),
    Bug(
        "positions of packed samples go on from sample to sample",
        "torch.cat([torch.arange(length) for length in self.lengths])[None]",
        "torch.arange(sum(self.lengths))[None]",
        ("test_language_model_stage",),
        "plain_model and llama and packed",
    ),
    Bug(
        "labels are shifted by two tokens",
        '(f["labels"].cpu().numpy()[1:], _NO_LABEL)',
        '(f["labels"].cpu().numpy()[2:], np.repeat(_NO_LABEL, len(f["labels"][:2])))',
        ("test_language_model_stage",),
        "plain_model and llama and packed",
    ),
    Bug(
        "a parameter that no microbatch reached has another gradient than zero",
        "return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))",
        "return torch.ones_like(parameter, dtype=gradient_dtype(parameter))",
        ("test_gradients",),
        "counts_as_zero or without_any",
    ),
    Bug(
        "a stage ends one layer too late",
        "crossing = s - 1 + np.searchsorted(",
        "crossing = s + np.searchsorted(",
        ("test_partition",),
    ),
    Bug(
        "a frozen stage has weight gradients",
        "cell_has_weight_gradient=has_backward & trainable[cell_stage]",
        "cell_has_weight_gradient=has_backward",
        ("test_zero_bubble", "test_dependencies", "test_routes"),
        "halves_that or reads or written or needs",
    ),
    Bug(
        "a run of layers counts as trainable if it ends where a trainable one begins",
        "any(first < layers[1] and layers[0] < last for first, last in self.trainable)",
        "any(first <= layers[1] and layers[0] < last for first, last in self.trainable)",
        ("test_plan",),
        "trainable_runs",
    ),
    Bug(
        "frozen parts keep their dropout",
        "if part is not None and not any(parameter.requires_grad for parameter in part.parameters()):",
        "if part is not None and not list(part.parameters()):",
        ("test_freezing",),
    ),
    Bug(
        "1F1B warms up with one forward too many",
        "one_group(routes, stages, warm_up[group])",
        "one_group(routes, stages, warm_up[group] + 1)",
        ("test_one_f_one_b",),
    ),
    Bug(
        "actions that end together are ordered by rank before transfers",
        "np.lexsort((rank, ticks, end_s))",
        "np.lexsort((ticks, rank, end_s))",
        ("test_order",),
    ),
    Bug(
        "the simulator forgets the time of messages",
        "message_start.append(begin) begin += seconds",
        "message_start.append(begin)",
        ("test_simulate",),
        "messages",
    ),
    Bug(
        "the simulator never frees memory",
        "for sizes in (hold.size, -hold.size)])",
        "for sizes in (hold.size, 0 * hold.size)])",
        ("test_memory_curves",),
    ),
    Bug(
        "values that nobody needs any more stay in memory",
        "return self._here[value] if left else self._here.pop(value)",
        "return self._here[value]",
        ("test_messages",),
        "last_use or left_over",
    ),
    Bug(
        "a checkpoint loses the second moment when it is loaded",
        "value.copy_(full if value.dim() == 0 else p.cut(full))",
        'value.copy_(full if value.dim() == 0 else p.cut(full) * (key != "exp_avg_sq"))',
        ("test_checkpoint",),
        "last_bit",
    ),
    Bug(
        "training resumes one batch too far",
        'self._position = (state["epoch"], state["step"])',
        'self._position = (state["epoch"], state["step"] + 1)',
        ("test_loader",),
        "resumed",
    ),
    Bug(
        "replicas get each other's shares of the batch",
        "for share in split_evenly(samples, num_shares(plan))]",
        "for share in split_evenly(samples, num_shares(plan))[::-1]]",
        ("test_assignment",),
    ),
    Bug(
        "unlike replicas get each other's microbatches",
        "return [tuple(islice(parts, n)) for n in plan.replica_microbatches]",
        "return [tuple(islice(parts, n)) for n in plan.replica_microbatches[::-1]]",
        ("test_assignment",),
    ),
    Bug(
        "every rank of a tensor-parallel group adds the bias",
        "return y if self.bias is None else y + self.bias.to(y.dtype)",
        "return y if self.bias is None else y + self.tp.size * self.bias.to(y.dtype)",
        ("test_tensor_parallel",),
        "families_equal and dtype0",
    ),
    Bug(
        "gradients that enter a tensor-parallel region are not summed",
        "return _collective(x, lambda x: x.view_as(x), lambda grad: all_reduce(grad, tp))",
        "return _collective(x, lambda x: x.view_as(x), lambda grad: grad)",
        ("test_tensor_parallel",),
        "single_token",
    ),
    Bug(
        "the vocabulary-parallel loss takes labels of ranks before for its own",
        "counted & (local >= 0) & (local < num_local)",
        "counted & (local >= -num_local) & (local < num_local)",
        ("test_vocab_parallel",),
        "cross_entropy_equals",
    ),
    Bug(
        "context-parallel ranks send their blocks of keys in another order",
        "sent = [place[self.needed(receiver, rank)] for receiver in range(self.cp.size)]",
        "sent = [place[self.needed(receiver, rank)][::-1] for receiver in range(self.cp.size)]",
        ("test_context_parallel",),
        "equals_one_rank and causal and all_gather",
    ),
    Bug(
        "the contrastive loss uses the logarithm of its scale",
        "_SummedLoss.apply(share, scale.exp(), ",
        "_SummedLoss.apply(share, scale, ",
        ("test_contrastive",),
        "drawn and 0",
    ),
    Bug(
        "gradients of contrasted features lack the scale",
        "d_rows.mul_(similarity.scale)",
        "d_rows.mul_(1.0)",
        ("test_contrastive_loss",),
        "shares_of_the_rows",
    ),
    Bug(
        "cross-attention enters one layer too early",
        'tuple(1 + block for block in getattr(model.config, "cross_attention_layers", ()))',
        'tuple(block for block in getattr(model.config, "cross_attention_layers", ()))',
        ("test_graph",),
        "where_encoders_enter",
    ),
    Bug(
        "a route enters the first stage whatever its layers",
        "if stage.module != edge.target or not any(first <= layer < last for layer in edge.layers):",
        "if stage.module != edge.target or first > 0:",
        ("test_routes",),
        "enters_at_its_layers",
    ),
    Bug(
        "plans that are read lose the field recompute",
        'return parse_strictly(Plan, text, what="plan")',
        'return parse_strictly(Plan, json.dumps(json.loads(text) | {"recompute": []}), what="plan")',
        ("test_plan",),
        "round_trips or every_field",
    ),
    Bug(
        "an error of the user's ends in a traceback",
        'print(f"motet: error: {one_line(error)}", file=sys.stderr)',
        "raise",
        ("test_mistakes",),
        "test_arguments",
    ),
    Bug(
        "copies of a parameter on one rank get the mean of their gradients",
        "return gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)",
        "return gradients[0] if len(gradients) == 1 else torch.stack(gradients).mean(0)",
        ("test_gradients",),
        "local_copies",
    ),
    Bug(
        "each tensor-parallel rank counts whole parameters in the gradient norm",
        "return self.is_first and (self.shard is not None or self.tp.rank == 0)",
        "return self.is_first",
        ("test_optimizer",),
        "plain_torch and layout1",
    ),
    Bug(
        "warm-up of the learning rate begins with zero",
        "return (finished_steps + 1) / self.warmup_steps",
        "return finished_steps / self.warmup_steps",
        ("test_optimizer",),
        "test_schedules",
    ),
    Bug(
        "gradients are clipped by the square of the factor",
        "factor = max_norm / (norm + 1e-6)",
        "factor = (max_norm / (norm + 1e-6)) ** 2",
        ("test_optimizer",),
        "plain_torch and layout1",
    ),
    Bug(
        "a fused weight's shard is cut from another rank's section",
        "ranges = local_ranges(full.shape[shard.dim], shard, rank, tp_size)",
        "ranges = local_ranges(full.shape[shard.dim], shard, (rank + 1) % tp_size, tp_size)",
        ("test_sharding",),
    ),
    Bug(
        "the planner charges frozen layers with gradients and moments",
        "if not trainable: return StaticBytes(weights=-(-size // num_shares))",
        "if not trainable and size < 0: return StaticBytes(weights=-(-size // num_shares))",
        ("test_memory",),
        "gradients_and_moments",
    ),
    Bug(
        "what encoders ran ahead is handed on to whatever batch comes",
        "known[0] is samples and known[1] == seed",
        "known[1] == seed",
        ("test_run_ahead",),
        "another_batch",
    ),
    Bug(
        "what runs ahead draws by the seed of the running step",
        "known = self._next_seed_digest if bound.is_ahead else self._seed_digest",
        "known = self._seed_digest",
        ("test_run_ahead",),
        "draws_are_those",
    ),
    Bug(
        "dropout is the same in every step",
        "return self.settings.seed, number - 1",
        "return self.settings.seed, 0",
        ("test_trainer",),
        "own_dropout",
    ),
)


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def pattern_of(anchor: str) -> re.Pattern[str]:
    return re.compile(r"\s+".join(map(re.escape, anchor.split())))


def place_of(bug: Bug, source: Path) -> Path:
    """The file that the bug changes. Raises `ValueError` if its anchor does not stand there exactly once."""
    pattern = pattern_of(bug.anchor)
    found = [path for path in python_files(source) for _ in pattern.finditer(path.read_text())]
    if len(found) != 1:
        where = f": {', '.join(path.name for path in found)}" if found else ""
        raise ValueError(f"the anchor stands {len(found)} times below src/motet, not once{where}; mend it in BUGS")
    return found[0]


def tests_of(bug: Bug, tests: Path) -> list[Path]:
    """Raises `ValueError` if some file is not there exactly once."""
    found = []
    for stem in bug.tests:
        paths = sorted(tests.rglob(f"{stem}.py"))
        if len(paths) != 1:
            raise ValueError(f"there are {len(paths)} files {stem}.py below tests/, not one; mend the bug's tests")
        found += paths
    return found


@dataclass(frozen=True)
class Outcome:
    state: str
    """caught, not caught, or error."""
    seconds: float
    told: str
    """By what it was caught, or what is wrong with the bug."""


class Project:
    """A copy of a checkout, in which bugs are planted one at a time."""

    def __init__(self, checkout: Path, timeout_s: float) -> None:
        self._checkout, self._timeout_s = checkout, timeout_s
        self._without_bug: dict[tuple[tuple[str, ...], str], tuple[str, str]] = {}
        """Outcome of each selection of tests."""

    def try_bug(self, bug: Bug) -> Outcome:
        """Plants the bug, runs its tests and takes the bug out again."""
        started = time.monotonic()
        state, told = self._try(bug)
        return Outcome(state, time.monotonic() - started, told)

    def _try(self, bug: Bug) -> tuple[str, str]:
        try:
            path = place_of(bug, self._checkout / "src" / "motet")
            tests = tests_of(bug, self._checkout / "tests")
        except ValueError as error:
            return "error", str(error)
        selection = bug.tests, bug.keyword
        if selection not in self._without_bug:
            self._without_bug[selection] = run_tests(bug, self._checkout, tests, self._timeout_s)
        state, told = self._without_bug[selection]
        if state != "passed":
            return "error", f"without the bug: {told}"
        original = path.read_text()
        changed = pattern_of(bug.anchor).sub(lambda _: bug.replacement, original)
        try:
            compile(changed, path.name, "exec")
        except SyntaxError as error:
            return "error", f"the replacement is no Python: {error}"
        path.write_text(changed)
        try:
            state, told = run_tests(bug, self._checkout, tests, self._timeout_s)
        finally:
            path.write_text(original)
        return {"failed": "caught", "passed": "not caught"}.get(state, state), told


def run_tests(bug: Bug, checkout: Path, tests: Sequence[Path], timeout_s: float) -> tuple[str, str]:
    """The state and its explanation: passed, failed or error."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *map(str, tests)]
    command += ["-k", bug.keyword] if bug.keyword else []
    command += ["-n", "0"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(checkout / "src"), str(checkout))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "failed", f"the tests did not end within {timeout_s:.0f} s"
    failed = re.search(r"^FAILED \S*?([^/\s]+::\S+)", done.stdout, re.M)
    if done.returncode == 1 and failed:
        return "failed", failed[1]
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    last = told[-1] if told else "without a word"
    if done.returncode == 0:
        return "passed", "all tests pass"
    return "error", f"pytest ended with code {done.returncode}: {last}"


def copy_of(checkout: Path, folder: Path) -> Path:
    """Copies the files of the checkout that the tests need."""
    copied = folder / "checkout"
    copied.mkdir()
    for name in COPIED:
        path = checkout / name
        if path.is_dir():
            shutil.copytree(path, copied / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif path.exists():
            shutil.copy(path, copied / name)
    return copied


def main(argv: Sequence[str] | None = None) -> list[tuple[Bug, Outcome]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", help="a bug's name or a part of it; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the bugs and where they would be planted")
    parser.add_argument("--report", action="store_true", help="write a report")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one bug")
    options = parser.parse_args(argv)
    bugs = [bug for bug in BUGS if not options.only or any(part in bug.name for part in options.only)]
    if not bugs:
        parser.error(f"--only: no bug is called {', '.join(options.only)}; see --list")
    if options.list:
        for bug in bugs:
            try:
                where = place_of(bug, ROOT / "src" / "motet").relative_to(ROOT).as_posix()
            except ValueError as error:
                where = f"error: {error}"
            print(f"{bug.name}: {where}; {', '.join(bug.tests)}{bug.keyword and f' -k {bug.keyword!r}'}")
        return []
    report = Report("planted-bugs", "Which planted bugs the tests see")
    tried = []
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        project = Project(copy_of(ROOT, Path(name)), options.timeout)
        for bug in bugs:
            outcome = project.try_bug(bug)
            tried.append((bug, outcome))
            print(f"{outcome.state:10} {outcome.seconds:5.1f} s  {bug.name}: {outcome.told}", flush=True)
    num_caught = sum(outcome.state == "caught" for _, outcome in tried)
    print(f"{num_caught} of {len(tried)} caught")
    report.goal("every bug is caught", num_caught == len(tried), f"{num_caught} of {len(tried)}")
    report.table(("bug", "outcome", "told by"), [(bug.name, outcome.state, outcome.told) for bug, outcome in tried])
    if options.report:
        report.write()
    return tried


if __name__ == "__main__":
    sys.exit(any(outcome.state != "caught" for _, outcome in main()))

"""The steps of `make gpu`: commands, their time limits, and how many GPUs they need.

Each prints one JSON object as the last line of its output, or is a test, whose exit code says all. A rehearsal runs
the same commands on CPUs in small sizes.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.yaml"


SHORT = ("train.steps=4", "train.checkpoint_every=2", "train.global_batch_size=8", "data.num_train=64")


@dataclass(frozen=True)
class Step:
    """`command`: arguments of Python. `environment`: added to this process's."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    environment: tuple[tuple[str, str], ...] = ()
    alone: bool = False
    """Whether it measures, or needs what steps before it have written: nothing runs beside it."""


def steps(num_gpus: int, *, rehearsal: bool, output: Path) -> list[Step]:
    """The list for one GPU, and with two or more the second list, too. `output`: a folder for what steps write.

    `num_gpus`: those of this machine; in a rehearsal, as many as are pretended to be there."""
    device = "cpu" if rehearsal else "cuda"
    found = _for_one(device, rehearsal, output)
    if num_gpus > 1:
        found += _for_several(device, output)
    # CPUs that others use, too, take their time.
    return [replace(step, limit_s=10 * step.limit_s) for step in found] if rehearsal else found


def settings(device: str, *, ranks: int = 1, parallel: str = "") -> tuple[str, ...]:
    """Overrides of the tiny example: everything on one rank unless `parallel` says otherwise."""
    parallel = parallel or (
        "{planner: explicit, placement: replicated, num_microbatches: 2, "
        "explicit: {vision: {}, audio: {}, language_model: {}}}"
    )
    return (*SHORT, f"cluster.device={device}", f"cluster.num_devices={ranks}", f"parallel={parallel}")


def _motet(command: str, device: str, output: Path, *more: str, ranks: int = 1, parallel: str = "") -> tuple[str, ...]:
    written = (f"train.output={output}",) if command == "train" else ()
    every = (*settings(device, ranks=ranks, parallel=parallel), *written, *more)
    return ("-m", "motet", command, str(TINY), *(part for setting in every for part in ("--set", setting)), "--json")


def _tests(path: str, *options: str) -> tuple[str, ...]:
    """Of a test file or function, all cases, those of campaigns among them."""
    chosen = ("-m", "campaign or not campaign", "--maxfail", "10", "--tb", "short")
    return ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *chosen, *options, path)


def _for_one(device: str, rehearsal: bool, output: Path) -> list[Step]:
    on_device = (("MOTET_TEST_DEVICE", device), ("PYTORCH_NVML_BASED_CUDA_CHECK", "1"))
    ranks = "tests/gpu/test_ranks_on_one_gpu.py"
    tiny = ("--tiny",) if rehearsal else ()
    kernels = ("test_tasks.py",) if rehearsal else ("test_flash_on_gpu.py", "-n", "6")
    # Elsewhere a rehearsal shows the lines, and the file itself the rest.
    fused = "families and (llama or phi3)" if rehearsal else "families or precision"
    float8 = "products or (precision and llama)" if rehearsal else "products or precision or fused"
    shapes = ("--lengths", "64", "--heads", "2:1", "--dim", "16", "--block", "32", "--repetitions", "1")
    shapes = shapes if rehearsal else ("--lengths", "8192", "--heads", "32:8", "--repetitions", "5")
    reports = (("MOTET_REPORTS", str(output.parent)),)
    shared = [part for setting in settings(device) for part in ("--set", setting)]
    resume = ("-m", "benchmarks.gpu.resume", str(TINY), "--output", str(output / "float32"), *shared)
    return [
        Step("versions", ("-m", "benchmarks.gpu.versions", "--device", device), 60, alone=True),
        Step("kernels", _tests(f"tests/attention/kernels/{kernels[0]}", *kernels[1:]), 120),
        Step("train and resume", resume, 120),
        Step("train bfloat16", _motet("train", device, output / "bfloat16", "train.dtype=bfloat16"), 90),
        Step("verify", _motet("verify", device, output, "train.dtype=float64"), 90),
        Step("verify families", _tests(f"{ranks}::test_families"), 120, on_device),
        Step("ranks on one GPU", _tests(f"{ranks}::test_layouts"), 120, on_device),
        Step("recovery", _tests("tests/gpu/test_recovery_on_one_gpu.py", "-s"), 120, on_device),
        Step("packed attention", _tests("tests/parallel/test_packed_attention.py", "-k", "dense"), 90, on_device),
        Step("fused kernels", _tests("tests/parallel/test_fused_kernels.py", "-k", fused), 90, on_device),
        Step("float8 linears", _tests("tests/parallel/test_float8_linears.py", "-k", float8), 45, on_device),
        Step("measure", ("-m", "benchmarks.gpu.measure", "--device", device, *tiny), 150, alone=True),
        Step("attention", ("-m", "benchmarks.attention_kernels", *shapes), 60, reports, alone=True),
        Step("stage variants", ("-m", "benchmarks.gpu.stage_variants", "--device", device, *tiny), 165, alone=True),
    ]


def _for_several(device: str, output: Path) -> list[Step]:
    replicated = (
        "{planner: explicit, placement: replicated, num_microbatches: 4, "
        "explicit: {vision: %s, audio: %s, language_model: {%s}}}"
    )
    tied = (
        "model.language_model={config: LlamaConfig, values: {vocab_size: 64, hidden_size: 64, intermediate_size: 128, "
        "num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}}"
    )
    two = {
        "verify tied stages": ("pp: 2", "{}"),
        "verify tensor parallelism": ("tp: 2", "{tp: 2}"),
        "verify data parallelism": ("dp: 2", "{dp: 2}"),
    }
    verified = [
        Step(
            name,
            _motet(
                "verify", device, output, "train.dtype=float64", tied,
                ranks=2, parallel=replicated % (encoders, encoders, language_model),
            ),
            90,
        )
        for name, (language_model, encoders) in two.items()
    ]  # fmt: skip
    pipeline = replicated % ("{}", "{}", "pp: 2")
    return [
        *verified,
        Step("train on two", _motet("train", device, output / "two", ranks=2, parallel=pipeline), 60),
        Step(
            "kill -9",
            ("-m", "benchmarks.gpu.kill", "--device", device, "--output", str(output / "kill")),
            120,
            alone=True,
        ),
        Step("communicators", ("-m", "benchmarks.gpu.communicator_memory", "--device", device), 60, alone=True),
        Step(
            "data parallel speed",
            (
                "-m",
                "benchmarks.gpu.stage_speed",
                "--device",
                device,
                "--dp",
                "2",
                *(("--tiny",) if device == "cpu" else ()),
            ),
            90,
            alone=True,
        ),
    ]


def python_command(step: Step) -> list[str]:
    """With a report of where all threads stand when the process is aborted at its time limit."""
    return [sys.executable, "-X", "faulthandler", *step.command]

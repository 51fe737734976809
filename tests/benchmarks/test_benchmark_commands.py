"""Every benchmark runs as a user starts it, `python -m benchmarks.NAME`, in its smallest size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

ENGINE = "--blocks 1 --steps 1 --layers 2 --width 64"
PROFILED = f"{ENGINE} --image-size 32 --repetitions 1 --costs costs.json"
COMMANDS = {
    "against_ddp_and_fsdp": f"{ENGINE} --microbatches 2 --image-size 32",
    "assigning": "--only-small --times 1 --operations 50",
    "attention_distribution": "--short 5000 --long 9000 --ranks 4 --draws 2 --repetitions 2",
    "attention_kernel_resources": "--capabilities 80 --dtypes fp32 --dims 64 --block 32 --json",
    "attention_kernels": "--lengths 64 --heads 2:1 --dim 16 --block 32 --repetitions 1",
    "attention_policies": "--lengths 12000 --ranks 3 --draws 1",
    "auto": "tiny",
    "auto_by_hand": "nothing",
    "balanced_data": "--data-sets ChartQA --batches 1 --cases 3",
    "chaos": "chaos.jsonl",
    "checkpoints": "--blocks 1 --layers 2 --width 64",
    "command_line": "--repetitions 1 --commands help",
    "contrastive_loss": "--open-clip . --num-samples 64 --alone 64 --width 8 --rounds 1",
    "data_service": "--megabytes 0.4 --batches 20 --batch-size 4 --steps 2 --slack 0.1",
    "deferral": "--blocks 1 --batches 1 --layers 3 --width 64 --repetitions 1 --costs costs.json",
    "distmm_pipe": "--width 32 --num-microbatches 2 --microbatch-size 2 --blocks 1 --steps-per-block 1",
    "drawing": "--seeds 0 --images 2 --questions 4 --set train.steps=2 --set train.checkpoint_every=2 "
    "--set data.num_train=64 --set train.warmup_steps=0",
    "expert_families": f"{ENGINE} --samples 4 --tokens 8",
    "failures": "trace.csv",
    "frozen_aware": PROFILED,
    "generator_ratio": f"{ENGINE} --repetitions 1 --costs costs.json",
    "message_bytes": "--layers 2 --width 64 --microbatches 2 --tokens 128 --only pp",
    "executor_overhead": "--rounds 1 --microbatches 4 --iterations 4",
    "host_waits": "--only padding",
    "pairs": "pairs.json --pairs 2",
    "pipeline_against_torch": f"{ENGINE} --microbatches 10 --samples 1 --tokens 8",
    "families": "families.json --only ^gpt2$",
    "shapes": "gpt2",
    "planned_results": "planned.json --only VLM-S.with.the.small --planners even",
    "planners": "partition --repetitions 1 --no-simulation",
    "planted_bugs": "--list",
    "post_balancing": "--data-sets ChartQA --batches 1 --samples 16",
    "prediction": f"{PROFILED} --cases 4",
    "profiling_size": "--runs 2",
    "published_throughput": "",
    "recovery": "--rounds 1",
    "run_ahead": PROFILED,
    "schedules": "--groups 2 --cells 40 --problems 1",
    "simulator_scale": "--actions 2560 --repetitions 1",
    "structure": "--no-training",
    "templates": "--runs 1 --problems 3",
    "three_towers": "--rounds 1",
    "with_and_without": "--blocks 1 --steps 1 --layers 2 --width 128 --repetitions 1",
    "zero_bubble": "--blocks 1 --steps 2 --layers 4 --width 64 --microbatches 10 --samples 1 --tokens 8",
}
CHAOS_TRIAL = {
    "seed": "0/0", "layout": "alike", "tolerate": 1, "detect_s": 1.0, "max_loss_error": 0.0, "done": [["simple"]],
    "losses": [{"node": 0, "how": "process", "phase": "forward", "after_steps": 1, "noticed_s": 0.5}],
    "moved_bytes": 0, "recovery_s": [1.0], "seconds": 20.0,
}  # fmt: skip
OPEN_CLIP = '''
import torch
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.nn import functional


class ClipLoss(nn.Module):
    """The dense loss behind the interface of open_clip's: rows of this process against columns of all."""

    def __init__(self, local_loss, gather_with_grad, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def forward(self, image, text, scale):
        everyone = [image, text]
        if self.world_size > 1:
            everyone = [torch.cat(collectives.all_gather(each)) for each in everyone]
        labels = torch.arange(len(image)) + self.rank * len(image)
        to_text = functional.cross_entropy(scale * image @ everyone[1].T, labels)
        return (to_text + functional.cross_entropy(scale * text @ everyone[0].T, labels)) / 2
'''


def scripts() -> set[str]:
    return {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()}


def test_every_script_is_run_and_described() -> None:
    assert set(COMMANDS) == scripts()
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert [path.name for path in (ROOT / "benchmarks").glob("[a-z]*.py") if f"`{path.name}`" not in readme] == []


@pytest.mark.campaign
@pytest.mark.parametrize("name", COMMANDS)
def test_script_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "chaos.jsonl").write_text(json.dumps(CHAOS_TRIAL) + "\n")
    added = "".join(f"0,add,n{i}\n" for i in range(12))
    (tmp_path / "trace.csv").write_text(f"{added}7200000,remove,n3\n9000000,add,n12\n")
    (tmp_path / "open_clip").mkdir()
    (tmp_path / "open_clip" / "loss.py").write_text(OPEN_CLIP)
    reports = tmp_path / "reports"
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {
        "MOTET_REPORTS": str(reports),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    finished = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *COMMANDS[name].split()],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=560, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.strip() or any(reports.glob("*.md")) or (tmp_path / "planned.json").exists()

"""The contrastive loss beside open_clip's: peak memory and time of forward and backward, on the same features.

open_clip's loss is its own `ClipLoss`, read from its package (`pip install --no-deps --target FOLDER open_clip_torch`,
then `--open-clip FOLDER`; none of its dependencies is needed). It holds whole matrices of similarities; motet's
computes them in blocks, and once more in the backward. Every measurement is a process of its own, which makes
the features first and then counts the memory that the loss adds. Alternatives take turns. Seconds are of processor
time, on one thread, so that what else runs on the machine counts little.

With `--num-processes`, each process holds an equal share of both towers' features; open_clip's then gathers features
with gradient and computes local losses (`local_loss`, `gather_with_grad`), as its manual has it.
"""

import argparse
import importlib.util
import resource
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from benchmarks.reporting import Report
from motet.models.stages.contrastive import BLOCK_BYTES, ContrastiveLoss, ContrastiveStage
from motet.parallel.context.context_attention import ContextParallel
from motet.schedule.batch_sync import Shares

GIB = 2**30


def load_open_clip_loss(folder: Path) -> ModuleType:
    """Its loss.py alone: the package's own __init__ would load torchvision and timm."""
    spec = importlib.util.spec_from_file_location("open_clip_loss", folder / "open_clip" / "loss.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def features(num_samples: int, width: int, rank: int, num_processes: int) -> tuple[Tensor, Tensor]:
    """This process's share, not yet normalized: pairs that are somewhat alike."""
    torch.manual_seed(rank)
    image = torch.randn(num_samples // num_processes, width)
    text = image + 2 * torch.randn_like(image)
    return image.requires_grad_(), text.requires_grad_()


def measure(
    rank: int, name: str, num_samples: int, width: int, num_processes: int, store: str, folder: Path, results: object
) -> None:
    torch.set_num_threads(1)
    if num_processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes)
    image, text = features(num_samples, width, rank, num_processes)
    scale = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))
    warm = torch.randn(64, 64)
    (warm @ warm).sum()
    before_bytes, before_s = peak_bytes(), time.process_time()
    if name == "open_clip":
        loss_class = load_open_clip_loss(folder).ClipLoss
        distributed = num_processes > 1
        loss = loss_class(local_loss=distributed, gather_with_grad=distributed, rank=rank, world_size=num_processes)(
            nn.functional.normalize(image, dim=1), nn.functional.normalize(text, dim=1), scale.exp()
        )
        loss = loss / num_processes  # Its gradients are such that the mean over processes is right.
    else:
        stage = ContrastiveStage(ContrastiveLoss("softmax", scale.item()), [("image", "text")], width)
        share = num_samples // num_processes
        places = [np.arange(r * share, (r + 1) * share) for r in range(num_processes)]
        group = dist.group.WORLD if num_processes > 1 else None
        stage.enable_context_parallel(ContextParallel(group, rank, num_processes))
        shares = Shares({"image": places, "text": places}, frozenset(["image", "text"]))
        loss = stage.loss({"image": image, "text": text}, shares) / num_samples
    loss.backward()
    seconds, added = time.process_time() - before_s, peak_bytes() - before_bytes
    assert image.grad is not None
    results.put((rank, loss.item(), seconds, added, image.grad.double().norm().item()))  # type: ignore[attr-defined]
    if num_processes > 1:
        dist.barrier()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(name: str, num_samples: int, width: int, num_processes: int, folder: Path) -> tuple[float, float, float, float]:
    """(loss, processor seconds of the slowest process, bytes of the fullest, norm of an image gradient)."""
    import tempfile

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as store:
        multiprocessing.spawn(  # type: ignore[no-untyped-call]
            measure,
            (name, num_samples, width, num_processes, f"{store}/rendezvous", folder, results),
            nprocs=num_processes,
        )
        found = sorted(results.get() for _ in range(num_processes))
    loss = statistics.mean(loss for _, loss, *_ in found) * (num_processes if name == "open_clip" else 1)
    return loss, max(f[2] for f in found), max(f[3] for f in found), found[0][4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open-clip", type=Path, required=True, help="the folder that its package was installed into")
    parser.add_argument("--num-samples", type=int, default=16_384)
    parser.add_argument("--alone", type=int, default=32_768, help="samples of motet's alone; 0: none")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-processes", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    report = Report("contrastive-loss", "The contrastive loss beside open_clip's")
    report.add(
        f"Forward and backward over features of {arguments.width}, float32. Seconds are processor time of the slowest "
        f"process, medians of {arguments.rounds} rounds in turn; memory is what the fullest process adds to its "
        f"features. motet holds a block of {BLOCK_BYTES / 2**20:.0f} MiB, twice; a whole matrix of similarities is "
        f"{arguments.num_samples**2 * 4 / GIB:.2f} GiB."
    )
    rows = []
    for num_processes in arguments.num_processes:
        found: dict[str, list[tuple[float, float, float, float]]] = {"open_clip": [], "motet": []}
        for i in range(arguments.rounds):
            for name in sorted(found, reverse=bool(i % 2)):
                found[name].append(
                    run(name, arguments.num_samples, arguments.width, num_processes, arguments.open_clip)
                )
                print(num_processes, name, found[name][-1], file=sys.stderr, flush=True)
        theirs, ours = found["open_clip"][0], found["motet"][0]
        for i in (0, 3):
            assert abs(theirs[i] - ours[i]) < 1e-4 * theirs[i], (theirs, ours)
        medians = {
            name: [statistics.median(values) for values in zip(*runs, strict=True)] for name, runs in found.items()
        }
        for name, (loss, seconds, added, _) in medians.items():
            rows.append(
                [arguments.num_samples, num_processes, name, f"{loss:.6f}", f"{seconds:.1f}", f"{added / GIB:.2f}"]
            )
        rows.append(
            [
                arguments.num_samples,
                num_processes,
                "motet / open_clip",
                "",
                f"{medians['motet'][1] / medians['open_clip'][1]:.2f}",
                f"{medians['motet'][2] / medians['open_clip'][2]:.3f}",
            ]
        )
    if arguments.alone:
        for num_processes in arguments.num_processes:
            loss, seconds, added, _ = run("motet", arguments.alone, arguments.width, num_processes, arguments.open_clip)
            rows.append(
                [arguments.alone, num_processes, "motet", f"{loss:.6f}", f"{seconds:.1f}", f"{added / GIB:.2f}"]
            )
    report.table(["samples", "processes", "", "loss", "processor s", "GiB added"], rows)
    report.write()


if __name__ == "__main__":
    main()

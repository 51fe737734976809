"""How many of transformers' causal language models have their shape read right.

Each type is built tiny (`motet.families.tiny`). Its shape, read on the meta device, is compared with the model on the
CPU: the number of parameters, and the FLOPs of a forward as torch's `FlopCounterMode` counts them.
"""

import argparse
import collections
import os
import signal
import warnings
from types import FrameType

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.reporting import Report
from motet.costs.analytic import layer_flops
from motet.costs.cost_model import Load
from motet.errors import UserError
from motet.families.shape_reading.module_shapes import module_workload
from motet.families.tiny import tiny_config

TOLERANCE = 0.03
MOST_SECONDS = 60


class TooSlow(Exception):
    """A type took longer than MOST_SECONDS."""


def _stop(signum: int, frame: FrameType | None) -> None:
    raise TooSlow(f"took longer than {MOST_SECONDS} s")


def compare(family: str, num_tokens: int) -> tuple[str, str]:
    """The outcome for one type, and what differs or why it was refused."""
    try:
        config = tiny_config(CONFIG_MAPPING[family]().get_text_config())
        config._experts_implementation = "eager"
        if getattr(config, "max_position_embeddings", None):  # Some count positions from 2.
            config.max_position_embeddings = 2 * num_tokens
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = model_class._from_config(config, attn_implementation="eager").float().eval()
    except Exception as error:  # Whatever a class raises whose defaults are no model.
        return "no tiny model", f"{type(error).__name__}: {error}"
    try:
        workload = module_workload(config, role="language_model")
    except UserError as error:
        return "refused", str(error)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if workload.num_parameters != num_parameters:
        return "parameters differ", f"{workload.num_parameters} for {num_parameters}"
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.arange(5, 5 + num_tokens)[None], use_cache=False)
    except Exception as error:  # Whatever a model raises that does not run so on the CPU.
        return "does not run", f"{type(error).__name__}: {error}"
    load = Load(tokens=num_tokens, pairs=num_tokens**2, outputs=num_tokens, sequences=1)
    flops = sum(layer_flops(layer).forward.seconds(load) for layer in workload.layers)
    ratio = flops / counter.get_total_flops()
    return ("equal" if abs(ratio - 1) <= TOLERANCE else "FLOPs differ"), f"{ratio:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="types, instead of all")
    parser.add_argument("--tokens", type=int, default=64, help="length of the sequence")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _stop)
    declared = sorted(family for family in CONFIG_MAPPING if CONFIG_MAPPING[family] in MODEL_FOR_CAUSAL_LM_MAPPING)
    rows = []
    for family in arguments.families or declared:
        signal.alarm(MOST_SECONDS)
        try:
            outcome, reason = compare(family, arguments.tokens)
        except TooSlow as error:
            outcome, reason = "no tiny model", str(error)
        finally:
            signal.alarm(0)
        rows.append((family, outcome, " ".join(reason.split())[:160].replace("|", "/")))
    counts = collections.Counter(outcome for _, outcome, _ in rows)
    report = Report("shapes", "Shapes of transformers' causal language models, read on the meta device")
    report.add(", ".join(f"{outcome}: {count}" for outcome, count in counts.most_common()))
    report.table(("type", "outcome", "FLOPs for torch's, or reason"), [row for row in rows if row[1] != "equal"])
    report.write()


if __name__ == "__main__":
    main()

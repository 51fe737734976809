"""Probes every causal language model and every model of several modalities that transformers declares: which features
are equal to one process?

Beside the features of `motet family check`, tensor and pipeline parallelism together on four processes, and the export:
plain transformers loads what motet writes of the model, with the same weights and, of a language model, the same
logits. Each family is probed in a process of its own, which is ended when its time is up. Results are written after
each family; started again, the script goes on after those that the file has, and after those that are published if
there is no file:

    python -m benchmarks.families results.json
    python -m benchmarks.families results.json --only 'qwen|llama' --features pipeline 'tensor and pipeline'
    python -m benchmarks.families results.json --only composites/
    python -m benchmarks.families results.json --publish

`--publish` puts the results into the package (`motet families`) and docs/families.md, and writes a report.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import copy
import json
import multiprocessing
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from benchmarks.reporting import Report
from motet.errors import UserError
from motet.families.capabilities import FEATURES, KNOWN, digest_of, probed_versions, results_folder, write_capabilities
from motet.families.discovery.composite import composite_class_of
from motet.families.stored_weights import stored_buffers, weights_of
from motet.families.tiny import perturb, tiny_config
from motet.models.hub.weights import check_part, save_part
from motet.runtime.verification.composite_probe import TRIALS as COMPOSITE_TRIALS
from motet.runtime.verification.composite_probe import probe_composite
from motet.runtime.verification.family_probe import TRIALS, Trial, config_of, probe

TOGETHER = "tensor and pipeline"
ALL_TRIALS = {**TRIALS, TOGETHER: Trial(stages=((0, 1), (2, 3)), tp_size=2)}
EXPORT = "export"
COMPOSITES = "composites/"
"""Before the type of a model of several modalities, in results."""
WANTED = {"pipeline": 130, TOGETHER: 75}
WANTED_COMPOSITES = {"pipeline": 30, TOGETHER: 15}
"""Goals: families that are equal."""
PUBLISHED = Path(__file__).parents[1] / "docs" / "generate" / "probed_families.json"
OF_CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
}
"""Values without a usable default in transformers' class: every checkpoint has its own."""
_WITH_SECTIONS = (
    "exaone4_5",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "glmga",
    "qwen2_5_vl",
    "qwen2_vl",
)
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
OF_COMPOSITES: Mapping[str, Mapping[str, Any]] = {
    **{key: {"text_config": {"rope_parameters": _SECTIONS}} for key in _WITH_SECTIONS},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": _SECTIONS}, "vision_start_token_id": 151652},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "voxtral": {"audio_token_id": 24},
}
"""The same, and tables that a smaller image would not be found in."""


def composite_values(model_type: str) -> dict[str, Any]:
    """A copy of what `OF_COMPOSITES` has, as configurations add to the dictionaries that they are given."""
    return copy.deepcopy(dict(OF_COMPOSITES.get(model_type, {})))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSON file; families that it has are not probed again")
    parser.add_argument("--only", metavar="PATTERN", default="", help="model types in which this pattern is found")
    parser.add_argument("--features", nargs="+", choices=[*ALL_TRIALS, EXPORT], default=[*ALL_TRIALS, EXPORT])
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds for each family")
    parser.add_argument("--publish", action="store_true", help="put the results into the package")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else _published()
    for name in names():
        missing = missing_trials(name, options.features, results)
        if not missing or not re.search(options.only, name):
            continue
        started = time.perf_counter()
        results[name] = probed_in_time(name, missing, results.get(name, {}), options.limit_s)
        options.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {time.perf_counter() - started:.1f} s, {_short(results[name])}", file=sys.stderr)
    if options.publish:
        _publish(results)
    _report(results, options.publish)
    return 0


def _published() -> dict[str, Any]:
    """Results for these versions that docs/families.md shows."""
    published = json.loads(PUBLISHED.read_text())
    return dict(published["families"]) if published["versions"] == probed_versions() else {}


def names() -> list[str]:
    """Names of all families. A model of several modalities that transformers declares causal too is listed as the
    former."""
    composites = [COMPOSITES + model_type for model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES]
    return [*(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if COMPOSITES + name not in composites), *composites]


def missing_trials(name: str, features: Sequence[str], results: Mapping[str, Any]) -> list[str]:
    """Trials of a family that the results lack."""
    before = results.get(name, {})
    known = COMPOSITE_TRIALS if name.startswith(COMPOSITES) else ALL_TRIALS
    wanted = [feature for feature in features if feature in (*known, EXPORT)]
    return [] if "refused" in before else [f for f in wanted if f not in before.get("reasons", {})]


def probed_in_time(name: str, features: Sequence[str], before: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """`probed` in a process of its own. When `limit_s` seconds are over, that process and those it has started are
    ended, and the features are refused."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_probed, args=(sender, name, features, before))
    process.start()
    sender.close()
    try:
        if receiver.poll(limit_s):
            found: dict[str, Any] = receiver.recv()
            return found
        late = f"its probe did not end within {limit_s:.0f} s"
    except EOFError:
        late = "the process of its probe ended"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return {**before, "reasons": {**before.get("reasons", {}), **dict.fromkeys(features, late)}}


def _send_probed(sender: Connection, name: str, features: Sequence[str], before: Mapping[str, Any]) -> None:
    os.setsid()  # Its processes can be ended together.
    sender.send(probed(name, features, before))


def probed(name: str, features: Sequence[str], before: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a family with those of these features. `before`: its earlier ones."""
    model_type, trials = name.removeprefix(COMPOSITES), [feature for feature in features if feature != EXPORT]
    try:
        if name.startswith(COMPOSITES):
            config = CONFIG_MAPPING[model_type](**composite_values(model_type))
            tiny = tiny_config(config, media=True)
            model_class = composite_class_of(tiny)
            found = probe_composite(tiny, {feature: COMPOSITE_TRIALS[feature] for feature in trials})
        else:
            tiny, model_class = tiny_config(usual_config(model_type)), AutoModelForCausalLM
            found = probe(tiny, {feature: ALL_TRIALS[feature] for feature in trials})
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:  # Whatever a configuration raises that has no default values.
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    if EXPORT in features:
        found = replace(found, reasons={**found.reasons, EXPORT: why_export_differs(tiny, model_class)})
    reasons = {**before.get("reasons", {}), **found.reasons}
    if not name.startswith(COMPOSITES) and reasons.keys() >= FEATURES.keys():
        of_package = {feature: reasons[feature] for feature in FEATURES}
        write_capabilities(digest_of(tiny.to_dict()), replace(found, reasons=of_package))
    return asdict(replace(found, reasons=reasons))


def why_export_differs(config: PretrainedConfig, model_class: Any) -> str | None:
    """None if plain transformers loads the same model from what motet writes."""
    torch.manual_seed(0)
    try:
        is_auto = model_class is AutoModelForCausalLM
        model = (model_class.from_config if is_auto else model_class)(copy.deepcopy(config)).eval()
        perturb(model)
        for buffer in stored_buffers(model).values():
            buffer.add_(torch.rand_like(buffer), alpha=0.05)
        check_part(type(model), model.config, where="model", is_causal=True)
        with TemporaryDirectory() as folder:
            save_part(Path(folder), type(model), model.config, weights_of(model), where="model")
            loaded, info = model_class.from_pretrained(folder, output_loading_info=True)
        if missing := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
            return f"{missing[0]} and {len(missing) - 1} others are missing in the file or in the model"
        stored, again = model.state_dict(), loaded.state_dict()
        if differing := [key for key, value in stored.items() if not torch.equal(value, again[key])]:
            return f"{differing[0]} differs"
        if is_auto:
            ids = torch.randint(3, config.get_text_config().vocab_size, (1, 9))
            with torch.no_grad():
                ours, plain = (each(input_ids=ids, use_cache=False).logits for each in (model, loaded.eval()))
            # Of equal weights; kernels may round otherwise where tensors lie otherwise.
            return None if torch.allclose(ours, plain, rtol=1e-4, atol=1e-5) else "the logits differ"
    except Exception as error:  # Whatever such a model raises.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def usual_config(model_type: str) -> PretrainedConfig:
    """The class's default values; of a class that leaves some to checkpoints, with such as they have."""
    values = dict(OF_CHECKPOINTS.get(model_type, {}))
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and hasattr(config_of(model_type), "is_decoder"):
        values["is_decoder"] = True  # Else it is an encoder.
    return CONFIG_MAPPING[model_type](**values) if values else config_of(model_type)


def _publish(results: Mapping[str, Any]) -> None:
    """Writes what docs/families.md is generated from, and puts complete results of the cache into the package: those of
    trainings with other flags, too."""
    short = {
        name: {key: each[key] for key in ("reasons", "refused", "date") if key in each}
        for name, each in results.items()
    }
    published = {"versions": probed_versions(), "families": short}
    PUBLISHED.write_text(json.dumps(published, indent=1, sort_keys=True) + "\n")
    paths = sorted(results_folder().glob("*.json"))
    known = {**json.loads(KNOWN.read_text()), **{path.stem: json.loads(path.read_text()) for path in paths}}
    current = {digest: each for digest, each in known.items() if each["versions"] == probed_versions()}
    KNOWN.write_text(json.dumps(current, indent=1, sort_keys=True) + "\n")


def _report(results: dict[str, Any], is_written: bool) -> None:
    report = Report(
        "families", "Language models and models of several modalities under each feature, against one process"
    )
    kinds = {
        "language models": ({n: r for n, r in results.items() if not n.startswith(COMPOSITES)}, ALL_TRIALS, WANTED),
        "models of several modalities": (
            {n.removeprefix(COMPOSITES): r for n, r in results.items() if n.startswith(COMPOSITES)},
            COMPOSITE_TRIALS,
            WANTED_COMPOSITES,
        ),
    }
    for kind, (own, trials, wanted) in kinds.items():
        _report_kind(report, kind, own, [*trials, EXPORT], wanted)
    if is_written:
        report.write()
    else:
        print(report.text())


def _report_kind(
    report: Report, kind: str, results: Mapping[str, Any], trials: Sequence[str], wanted: Mapping[str, int]
) -> None:
    probed = {name: result["reasons"] for name, result in results.items() if "reasons" in result}
    found = {f: [reasons[f] for reasons in probed.values() if f in reasons] for f in trials}
    counts = {f: found[f].count(None) for f in trials}
    differing = {f: sum("differ" in (reason or "") for reason in found[f]) for f in trials}
    report.add(f"{len(results)} {kind}, of which {len(results) - len(probed)} could not be built as a tiny model.")
    report.table(
        ["feature", "equal", "refused because gradients differ", "refused for another reason"],
        [[f, counts[f], differing[f], len(found[f]) - counts[f] - differing[f]] for f in trials],
    )
    for feature, least in wanted.items():
        report.goal(f"at least {least} {kind} equal under {feature}", counts[feature] >= least, str(counts[feature]))
    causes = Counter(result["refused"] for result in results.values() if "refused" in result)
    report.table(["why no tiny model could be built", "families"], causes.most_common())
    for feature in wanted:
        report.table(
            [f"refused: {feature}", "why"],
            [[name, reasons[feature]] for name, reasons in sorted(probed.items()) if reasons.get(feature) is not None],
        )


def _short(result: dict[str, Any]) -> str:
    if "refused" in result:
        return f"not built: {result['refused'][:80]}"
    refused = [feature for feature, reason in result["reasons"].items() if reason is not None]
    return f"refused {', '.join(refused)}" if refused else "all equal"


if __name__ == "__main__":
    sys.exit(main())

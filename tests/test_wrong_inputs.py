"""Wrong run files and plans: each is refused in one line that names the key or the place, and none hangs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from sampling import examples
from training import plan_of, run_config

from motet.config import load_run_config
from motet.errors import UserError
from motet.plan import Plan
from motet.strict_parsing import parse_yaml

CONFIG = run_config(Path("run"), train__failures={})
RIGHT: dict[str, Any] = json.loads(CONFIG.model_dump_json())
TEXTS = {
    "deeply nested": ("model: " + "[" * 50_000, "nested more than 50 deep"),
    "nested": ("model: " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
    "a date that is none": ("train: {steps: 2026-13-45}", "'2026-13-45' is no timestamp"),
    "a word as a whole number": ("train: {steps: !!int frobnicate}", "'frobnicate' is no int"),
    "a word as a number": ("train: {eps: !!float frobnicate}", "'frobnicate' is no float"),
    "a word as a truth": ("train: {overwrite: !!bool frobnicate}", "'frobnicate' is no bool"),
    "a word as a date": ("train: {steps: !!timestamp frobnicate}", "'frobnicate' is no timestamp"),
    "bytes that are none": ("train: {steps: !!binary frobnicate!}", "failed to decode base64 data"),
    "5000 digits": ("train: {steps: " + "9" * 5000 + "}", "is no int"),
    "a value in itself": ("model: &a [*a]", "a value contains itself"),
    "a mapping in itself": ("model: &a {b: *a}", "a value contains itself"),
    "an alias bomb": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
        "more than 200000 values",
    ),
    "an object of Python": ("model: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    "a key that stands twice": ("train: {steps: 1, steps: 2}", "key 'steps' stands twice"),
    "a list as a key": ("? [a]\n: 1", "a key must be a word"),
    "an unknown alias": ("model: *nowhere", "undefined alias"),
    "two documents": ("model: 1\n---\nmodel: 2", "found another document"),
    "nothing": ("", "is not a mapping"),
    "a list": ("- model", "is not a mapping"),
    "a tab": ("train:\n\tsteps: 1", "cannot start any token"),
    "a control character": ("train: \x00", "is not YAML|special characters"),
    "no end": ("train: {steps: 1", "expected ',' or '}'"),
    "100 MB": ("x" * (5 * 2**20), "is larger than 4 MiB"),
}
VALUES = {
    "train.learning_rate": (1e300, -1, 0, "fast", None, [1]),
    "train.betas": ([1, 0.9], [0.9, 1], [0.9], [-0.1, 0.9], "ab"),
    "train.steps": (0, -1, 1.5, "many", 10**30 * -1, True),
    "train.keep_checkpoints": (0, -1, "all"),
    "train.global_batch_size": (0, -8, 0.5),
    "train.failures.detect_s": (0, -1, "soon"),
    "train.failures.slow_ratio": (1, 0, "slow"),
    "train.eps": (0, -1e-8),
    "cluster.num_devices": (0, -1, "all"),
    "cluster.device": ("gpu", "tpu", 1),
    "parallel.planner": ("best", 1),
    "parallel.num_microbatches": (0, -1),
    "data.kind": ("nothing", 1),
}


def leaves(model: BaseModel | Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Paths of all keys that a run file's sections have, and whether each is a section itself."""
    for name in type(model).model_fields:
        inner = getattr(model, name)
        yield (*path, name), isinstance(inner, BaseModel)
        if isinstance(inner, BaseModel):
            yield from leaves(inner, (*path, name))


KEYS = list(leaves(CONFIG))
SECTIONS = [(), *(path for path, is_section in KEYS if is_section)]


def with_value(path: tuple[str, ...], value: object) -> str:
    values = json.loads(json.dumps(RIGHT))
    at = values
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return yaml.safe_dump(values)


def refusal(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        load_run_config(path)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 2000
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(("text", "expected"), TEXTS.values(), ids=TEXTS)
def test_texts(tmp_path: Path, text: str, expected: str) -> None:
    assert re.search(expected, refusal(tmp_path, text))


def test_the_right_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RIGHT))
    assert load_run_config(tmp_path / "run.yaml") == CONFIG


@pytest.mark.parametrize("section", SECTIONS, ids=".".join)
def test_misspelt_keys(tmp_path: Path, section: tuple[str, ...]) -> None:
    key = ".".join((*section, "frobnicate"))
    assert f"{key}: is not a known key" in refusal(tmp_path, with_value((*section, "frobnicate"), 3))


@pytest.mark.parametrize("key", [path for path, _ in KEYS if path[-1] != "values"], ids=".".join)
def test_values_of_another_type(tmp_path: Path, key: tuple[str, ...]) -> None:
    """A mapping with a key that nothing has, and a list of lists."""
    for value in ({"frobnicate": {"x": 3}}, [[[1]]]):
        assert refusal(tmp_path, with_value(key, value)).startswith(".".join(key)), value


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in VALUES.items() for value in values])
def test_values_out_of_range(tmp_path: Path, key: str, value: object) -> None:
    assert refusal(tmp_path, with_value(tuple(key.split(".")), value)).startswith(key)


@pytest.mark.parametrize("value", ["&a [*a]", "[" * 9999, "2026-13-45", "!!int x", "9" * 5000, "{", "&a", "*a", "\x07"])
def test_overrides(tmp_path: Path, value: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RIGHT))
    with pytest.raises(UserError) as refused:
        load_run_config(tmp_path / "run.yaml", [f"train.steps={value}"])
    assert "\n" not in str(refused.value)


def test_a_device_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(UserError, match="/dev/zero: is larger than 4 MiB"):
        load_run_config("/dev/zero")


@pytest.mark.parametrize("rank", [10**9, -1, 7])
def test_ranks_of_a_plan(rank: int) -> None:
    plan = json.loads(plan_of(run_config(Path())).to_json())
    plan["modules"]["language_model"]["replicas"][0]["stages"][0]["ranks"] = [rank]
    with pytest.raises(ValueError, match="rank") as refused:
        Plan.from_json(json.dumps(plan))
    assert len(str(refused.value)) < 500


@examples(200)
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda drawn: drawn.decode("latin-1")))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    message = ""
    try:
        parse_yaml(text, "run.yaml")
    except UserError as error:
        message = str(error)
    assert "\n" not in message

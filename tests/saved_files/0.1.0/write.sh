#!/bin/sh -e
# Writes plans, costs and checkpoints by the installed version of motet; run in this folder. README.md says more.
plan() { # NAME RUN_FILE OVERRIDE...
    name=$1 run_file=$2
    shift 2
    python -m motet plan "run_files/$run_file.yaml" --out "plans/$name.json" "$@"
}
cores="--set cluster.num_cores=2" # Of a machine that has others, predictions for processes on CPUs are others.

mkdir -p plans costs checkpoints
plan tiny tiny $cores
plan demo_encoders_colocated demo $cores --set parallel.placement=colocated
plan plan_64_gpus plan_64_gpus
plan plan_64_gpus_interleaved plan_64_gpus --set parallel.planner=megatron_balanced
plan plan_64_gpus_encoders_replicated plan_64_gpus --set parallel.planner=encoders_replicated
plan siglip_qwen3 siglip_qwen3_described
plan three_towers three_towers $cores
plan llava_zero_bubble_v llava_8_gpus --set parallel.schedule=zero_bubble_v
plan generating_disttrain generating_16_a800
plan valm_optimus valm_24_a40 --set parallel.planner=optimus
plan small_zero_bubble_h1 small $cores
plan unequal_pipelines unequal_pipelines
plan long_context long_context
plan conversations_entrain conversations $cores
plan captioned captioned $cores

python - <<'PYTHON'
from pathlib import Path

from motet.cli.typical_batch import read_problem
from motet.config import load_run_config

problem = read_problem(load_run_config("run_files/long_context.yaml", []))
Path("costs/computed.json").write_text(problem.table.to_json() + "\n")
PYTHON
python -m motet profile run_files/small.yaml --out costs/measured.json
python -m motet profile run_files/small.yaml --speeds costs/speeds.json

for name in small small_towers; do
    output=$(mktemp -d)
    python -m motet train "run_files/$name.yaml" --set "train.output=$output"
    rm -rf "checkpoints/$name"
    mkdir "checkpoints/$name"
    cp -r "$output/checkpoints/step_00000002" "checkpoints/$name/"
    rm -r "$output"
done
python ../record.py .

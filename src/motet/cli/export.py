"""The end of a training run: the model as a folder that plain transformers loads."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.config import RunConfig
    from motet.data.preparation.preparation_part import Preparation
    from motet.data.preparation.tower_preparation import TowerPreparation


def export_checkpoint(
    config: "RunConfig", preparation: "Preparation | TowerPreparation", checkpoint: str | Path
) -> Path:
    """Writes `export` in the run's output folder and returns it. Raises `UserError` if the checkpoint is damaged."""
    from motet.data.preparation.tower_preparation import TowerPreparation

    if isinstance(preparation, TowerPreparation):
        return _export_towers(config, preparation, checkpoint)
    from motet.models.hub.export import describe_config, export_parts
    from motet.models.hub.weights import CheckpointTensors

    placeholders = {name: preparation.placeholder_id(name) for name in preparation.encoders}
    folder = Path(config.train.output) / "export"
    export_parts(
        CheckpointTensors(checkpoint),
        describe_config(config.model, placeholders),
        folder,
        tokenizer=preparation.tokenizer,
        processors={name: encoder.processor for name, encoder in preparation.encoders.items()},
    )
    return folder


def _export_towers(config: "RunConfig", preparation: "TowerPreparation", checkpoint: str | Path) -> Path:
    from motet.models.hub.export_towers import export_towers
    from motet.models.hub.weights import CheckpointTensors

    folder = Path(config.train.output) / "export"
    export_towers(CheckpointTensors(checkpoint), config.model, folder, processors=preparation.tools)
    return folder

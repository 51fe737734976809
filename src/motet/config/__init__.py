"""The run file and how it is read. Pure: no torch."""

from motet.config.reading import load_catalogue, load_run_config, parse_strictly
from motet.config.schema import (
    LANGUAGE_MODEL,
    CatalogueConfig,
    ClusterConfig,
    ConversationsConfig,
    DescribedConfig,
    DialADigitConfig,
    EncoderConfig,
    LanguageModelConfig,
    ModelConfig,
    ModuleParallelConfig,
    ParallelConfig,
    PartConfig,
    PreparedDataConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "LANGUAGE_MODEL",
    "CatalogueConfig",
    "ClusterConfig",
    "ConversationsConfig",
    "DescribedConfig",
    "DialADigitConfig",
    "EncoderConfig",
    "LanguageModelConfig",
    "ModelConfig",
    "ModuleParallelConfig",
    "ParallelConfig",
    "PartConfig",
    "PreparedDataConfig",
    "RunConfig",
    "TrainConfig",
    "load_catalogue",
    "load_run_config",
    "parse_strictly",
]

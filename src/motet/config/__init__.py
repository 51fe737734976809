"""The run file and how it is read. Pure: no torch."""

from motet.config.data_section import (
    ConversationsConfig,
    DescribedConfig,
    DialADigitConfig,
    PairsConfig,
    PreparedDataConfig,
    SameDigitsConfig,
)
from motet.config.model_section import (
    ContrastiveConfig,
    DecoderConfig,
    EncoderConfig,
    LanguageModelConfig,
    ModelConfig,
    PartConfig,
    TowerConfig,
)
from motet.config.parallel_section import ModuleParallelConfig, ParallelConfig
from motet.config.reading import load_catalogue, load_run_config, parse_strictly
from motet.config.schema import CatalogueConfig, ClusterConfig, RunConfig, TrainConfig

__all__ = [
    "CatalogueConfig",
    "ClusterConfig",
    "ContrastiveConfig",
    "ConversationsConfig",
    "DecoderConfig",
    "DescribedConfig",
    "DialADigitConfig",
    "EncoderConfig",
    "LanguageModelConfig",
    "ModelConfig",
    "ModuleParallelConfig",
    "PairsConfig",
    "ParallelConfig",
    "PartConfig",
    "PreparedDataConfig",
    "RunConfig",
    "SameDigitsConfig",
    "TowerConfig",
    "TrainConfig",
    "load_catalogue",
    "load_run_config",
    "parse_strictly",
]

"""The run file: its schema and how it is read. Imports no torch."""

from motet.config.data_section import (
    USUAL_LIMITS,
    ConversationsConfig,
    DescribedConfig,
    DialADigitConfig,
    FileLimits,
    FilesConfig,
    PairsConfig,
    PreparedDataConfig,
    SameDigitsConfig,
    VideoConfig,
)
from motet.config.model_section import (
    CompositePartConfig,
    ContrastiveConfig,
    DecoderConfig,
    EncoderConfig,
    GeneratorConfig,
    LanguageModelConfig,
    ModelConfig,
    PartConfig,
    TowerConfig,
)
from motet.config.parallel_section import ModuleParallelConfig, ParallelConfig
from motet.config.run_file import (
    CatalogueConfig,
    ClusterConfig,
    RunConfig,
    TrainConfig,
    load_catalogue,
    load_run_config,
)

__all__ = [
    "USUAL_LIMITS",
    "CatalogueConfig",
    "ClusterConfig",
    "CompositePartConfig",
    "ContrastiveConfig",
    "ConversationsConfig",
    "DecoderConfig",
    "DescribedConfig",
    "DialADigitConfig",
    "EncoderConfig",
    "FileLimits",
    "FilesConfig",
    "GeneratorConfig",
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
    "VideoConfig",
    "load_catalogue",
    "load_run_config",
]

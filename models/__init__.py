"""Networks, data sets, partitioners, and the task that ties model, data and loss together.

Knows torch only: nothing here imports the other packages of gradbus. Importing it loads neither torchvision nor Pillow;
these are needed only where MNIST is downloaded and where glyphs are drawn.
"""

from . import partition
from .classification import ClassificationTask, Loss, TrainFn
from .cnn import mnist_cnn
from .data import Dataset, DataSplit, batches, normalise
from .dropout import SeededDropout, reseed_dropout
from .glyph_set import glyphs
from .init import init_parameters
from .mlp import mnist_mlp
from .mnist_set import DATA_ROOT_VARIABLE, DataMissing, mnist, resolve_data_root
from .null import FlatModel, NullTask
from .optimizers import load_optimizers
from .parallel import ShardBatch, num_shard_batches, shard_indices
from .partition import PartitionSpec
from .results import EvalResult, ShardResult, TrainingStopped, TrainResult
from .seeds import derive_seed, seeded_generator, seeded_global_generator
from .sources import load
from .task import Task

__all__ = [
    "DATA_ROOT_VARIABLE",
    "ClassificationTask",
    "DataMissing",
    "DataSplit",
    "Dataset",
    "EvalResult",
    "FlatModel",
    "Loss",
    "NullTask",
    "PartitionSpec",
    "SeededDropout",
    "ShardBatch",
    "ShardResult",
    "Task",
    "TrainFn",
    "TrainResult",
    "TrainingStopped",
    "batches",
    "derive_seed",
    "glyphs",
    "init_parameters",
    "load",
    "load_optimizers",
    "mnist",
    "mnist_cnn",
    "mnist_mlp",
    "normalise",
    "num_shard_batches",
    "partition",
    "reseed_dropout",
    "resolve_data_root",
    "seeded_generator",
    "seeded_global_generator",
    "shard_indices",
]

"""Networks, data sets, partitioners, and the task that ties model, data and loss together.

Knows torch only: nothing here imports the other packages of gradbus. Importing it loads neither torchvision nor Pillow;
these are needed only where MNIST is downloaded and where glyphs are drawn.
"""

from . import partition
from .classification import ClassificationTask, Loss, TrainFn
from .data import Dataset, DataSplit, batches, normalise
from .data_sets import glyphs, load
from .local_sgd import local_sgd
from .mnist_files import DATA_ROOT_VARIABLE, DataMissing, mnist, resolve_data_root
from .networks import SeededDropout, init_parameters, mnist_cnn, mnist_linear, mnist_mlp, reseed_dropout
from .noop import NoopTask, VectorModel
from .parallel import ShardBatch, num_shard_batches, shard_indices
from .partition import PartitionSpec
from .seeds import derive_seed, seeded_generator, seeded_global_generator
from .task import EvalResult, Metric, ShardResult, Task, TrainingStopped, TrainResult

__all__ = [
    "DATA_ROOT_VARIABLE",
    "ClassificationTask",
    "DataMissing",
    "DataSplit",
    "Dataset",
    "EvalResult",
    "Loss",
    "Metric",
    "NoopTask",
    "PartitionSpec",
    "SeededDropout",
    "ShardBatch",
    "ShardResult",
    "Task",
    "TrainFn",
    "TrainResult",
    "TrainingStopped",
    "VectorModel",
    "batches",
    "derive_seed",
    "glyphs",
    "init_parameters",
    "load",
    "local_sgd",
    "mnist",
    "mnist_cnn",
    "mnist_linear",
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

"""Gradients in the formats of federated updates, with error feedback: ``q8``, ``s4``, ``sq8``, and codecs of users.

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD",
ICML 2019 (arXiv:1901.09847), algorithm 2, with C the codec (``docs/codecs.md``):

    p = g + e;  c = C(p);  e = p - c;  gradient = (1 / N) sum of c over the ranks

A bucket is one vector: a codec chooses the largest entries, and cuts chunks, across its tensors, as it does across a
model in a federated run. ``topk`` chooses by tensor, and sends small tensors dense; ``bytegrad`` rounds between the
smallest and largest value of a chunk, without feedback.

``q8`` sends each rank its part, and the means back, 2 (N - 1) / N bytes an entry with more than two ranks; a mean is
rounded a second time, with a residual of its own (:mod:`.compressed_mean`). The sparse codecs send whole messages to
all, as ``topk`` does: the largest entries of a mean are not those of its terms. So do codecs of users, whose messages
may have any length.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradbus.codecs import Codec, check_codec_class, get
from gradbus.codecs.q8 import ChunkElems
from gradbus.codecs.s4 import Density
from gradbus.runtime.algorithms import base
from gradbus.runtime.algorithms.base import Algorithm, Place, Step, TensorBucket
from gradbus.runtime.algorithms.compressed_mean import RESIDUAL, RESIDUAL_OF_MEAN, mean_of_coded
from gradbus.runtime.algorithms.requests import Program


class CodecFeedback(Algorithm):
    """The mean of whole buckets, each in one message of a codec."""

    own = frozenset({RESIDUAL})
    in_parts: ClassVar[bool] = False
    """Whether each rank averages a part; for a codec whose messages of one vector length have one size."""

    def __init__(self, place: Place, options: Any) -> None:
        super().__init__(place, options)
        self._codec = self.make_codec()

    @abstractmethod
    def make_codec(self) -> Codec:
        """The codec with the options of this algorithm."""

    @torch.no_grad()
    def exchange(self, bucket: TensorBucket, step: Step) -> Program[None]:
        if not bucket.flat.numel():
            return
        p: Tensor = bucket.flat
        if step.active < self.place.world:  # so that the mean is over those with data, and residuals keep their weight
            p = p * (self.place.world / step.active)
        sizes = [tensor.numel() for tensor in bucket.tensors.values()]
        parts = zip(bucket.tensors, p.split_with_sizes(sizes), strict=True)
        residual = torch.cat([self.memory.find_or_zeros(RESIDUAL, name, part) for name, part in parts])
        # By the first name, and not the number, of the bucket: DDP cuts its buckets anew after the first step.
        mean, left = yield from mean_of_coded(
            self.place, self.memory, next(iter(bucket.tensors)), p, residual, self._codec, in_parts=self.in_parts
        )
        for name, part in zip(bucket.tensors, left.split_with_sizes(sizes), strict=True):
            self.memory.stage(RESIDUAL, name, part.clone())
        bucket.flat.copy_(mean)


class Q8Feedback(CodecFeedback):
    """8-bit gradients with error feedback, a scale for each chunk."""

    choice = "q8"
    own = frozenset({RESIDUAL, RESIDUAL_OF_MEAN})
    relative = frozenset({RESIDUAL_OF_MEAN})
    in_parts = True

    class Options(base.Options):
        """Options of ``q8``."""

        chunk_elems: ChunkElems = 8192
        """Number of entries that share a scale."""

    def make_codec(self) -> Codec:
        return get("q8", chunk_elems=self.options.chunk_elems)


class S4Feedback(CodecFeedback):
    """The largest entries of each bucket in float32, with error feedback."""

    choice = "s4"

    class Options(base.Options):
        """Options of ``s4``."""

        density: Density = 0.1
        """Share of the entries of a bucket that is sent."""

    @property
    def density(self) -> float:
        return float(self.options.density)

    def make_codec(self) -> Codec:
        return get("s4", density=self.options.density)


class SQ8Feedback(S4Feedback):
    """The largest entries of each bucket in 8 bits, with error feedback."""

    choice = "sq8"

    class Options(S4Feedback.Options):
        """Options of ``sq8``."""

        chunk_elems: ChunkElems = 8192
        """Number of entries sent that share a scale."""

    def make_codec(self) -> Codec:
        return get("sq8", density=self.options.density, chunk_elems=self.options.chunk_elems)


class OwnCodecFeedback(CodecFeedback):
    """The mean of whole buckets, each in one message of a codec that is not built in."""

    codec: ClassVar[type[Codec]]

    def make_codec(self) -> Codec:
        return self.codec(**dict(self.options))


@functools.cache
def algorithm_of_codec(kind: type[Codec]) -> type[Algorithm]:
    """The algorithm that exchanges gradients in this codec: its name in errors and its options are the codec's.

    Raises:
        ValueError: the class cannot be used as a codec; the text says what to change.
    """
    check_codec_class(kind)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (OwnCodecFeedback,), {**named, "codec": kind, "Options": kind.Options})

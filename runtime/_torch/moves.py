"""Collectives that move tensors, as tasks: for each, what this rank sends and where what comes in has its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from gradbus.runtime.collectives.data_movement import Barrier
from gradbus.runtime.collectives.operation import Operation
from gradbus.runtime.collectives.tensors import plain
from gradbus.torch.call import CollectiveCall, copies, together
from gradbus.torch.shapes import are_ready, check
from gradbus.torch.tensor_exchange import TensorExchange, overlap, same_memory, staging_tensor

_OWN_LATER_BYTES = 256 << 10


class Moves:
    """For one rank of one group. All calls raise ValueError or RuntimeError for arguments that do not fit."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> CollectiveCall:
        """``outputs[r]`` gets the tensor of rank r; their sizes may differ."""
        self._check_count("outputs", outputs)
        lands, source = outputs, tensor
        if not are_ready(tensor, outputs):  # all others wait for what is done before the payload leaves
            check(tensor, *outputs)
            _check_dtypes(outputs, tensor)
            lands, source = [staging_tensor(output) for output in outputs], plain(tensor)
        into = dict(enumerate(lands))
        land = into.pop(self.rank)
        if any(overlap(source, other) for other in into.values()):
            source = source.clone()
        own = _own_part(land, source)
        operation = TensorExchange("all_gather", self.rank, self.world, to_all=source, into=into, own=own)
        elsewhere = None
        if lands is not outputs:
            elsewhere = copies([pair for pair in zip(outputs, lands, strict=True) if pair[0] is not pair[1]])
        return CollectiveCall("all_gather", [operation], list(outputs), elsewhere)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> CollectiveCall:
        """Part r of the output gets the tensor of rank r."""
        check(output)
        if output.numel() != tensor.numel() * self.world:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        land = staging_tensor(output)
        task = self.all_gather(land.view(-1).tensor_split(self.world), tensor)
        return CollectiveCall("all_gather_single", task.operations, [output], copies([(output, land)]))

    def all_gather_lists(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> CollectiveCall:
        """``outputs[r][i]`` gets ``tensors[i]`` of rank r."""
        self._check_count("outputs", outputs)
        tasks = [self.all_gather([of_rank[i] for of_rank in outputs], tensor) for i, tensor in enumerate(tensors)]
        return together("all_gather_coalesced", tasks, [t for of_rank in outputs for t in of_rank])

    def broadcast(self, tensor: Tensor, root: int) -> CollectiveCall:
        """All get the root's tensor."""
        check(tensor)
        signature = f"broadcast {root}"
        if self.rank == root:
            operation = TensorExchange(signature, self.rank, self.world, to_all=plain(tensor), receipts=True)
            return CollectiveCall("broadcast", [operation], [tensor])
        land = staging_tensor(tensor)
        operation = TensorExchange(signature, self.rank, self.world, into={root: land}, receipts=True)
        return CollectiveCall("broadcast", [operation], [tensor], copies([(tensor, land)]))

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> CollectiveCall:
        """The root's ``outputs[r]`` gets the tensor of rank r; the others give no outputs."""
        check(tensor, *outputs)
        signature = f"gather {root}"
        if self.rank != root:
            operation = TensorExchange(signature, self.rank, self.world, to={root: plain(tensor)}, receipts=True)
            return CollectiveCall("gather", [operation], [tensor])
        self._check_count("outputs", outputs)
        _check_dtypes(outputs, tensor)
        lands = [staging_tensor(output) for output in outputs]
        _put(lands[root], plain(tensor))
        operation = TensorExchange(signature, self.rank, self.world, into=dict(enumerate(lands)), receipts=True)
        return CollectiveCall("gather", [operation], list(outputs), copies(list(zip(outputs, lands, strict=True))))

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> CollectiveCall:
        """The output of rank r gets the root's ``tensors[r]``; the others give no tensors."""
        check(output, *tensors)
        signature = f"scatter {root}"
        land = staging_tensor(output)
        if self.rank != root:
            operation = TensorExchange(signature, self.rank, self.world, into={root: land}, receipts=True)
            return CollectiveCall("scatter", [operation], [output], copies([(output, land)]))
        self._check_count("tensors", tensors)
        _check_dtypes(tensors, output)
        sources = [plain(tensor) for tensor in tensors]
        output.detach().copy_(sources[root].view(output.shape))
        operation = TensorExchange(signature, self.rank, self.world, to=dict(enumerate(sources)), receipts=True)
        return CollectiveCall("scatter", [operation], [output])

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> CollectiveCall:
        """``outputs[r]`` gets what rank r has in the place of this rank in its ``tensors``. Sizes may differ."""
        self._check_count("outputs", outputs)
        self._check_count("tensors", tensors)
        check(*outputs, *tensors)
        _check_dtypes(outputs, tensors[0])
        lands = [staging_tensor(output) for output in outputs]
        sources = [plain(tensor) for tensor in tensors]
        sources = [s.clone() if any(overlap(s, land) for land in lands) else s for s in sources]
        _put(lands[self.rank], sources[self.rank])
        operation = TensorExchange(
            "all_to_all", self.rank, self.world, to=dict(enumerate(sources)), into=dict(enumerate(lands))
        )
        return CollectiveCall("all_to_all", [operation], list(outputs), copies(list(zip(outputs, lands, strict=True))))

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> CollectiveCall:
        """The same with the parts of one tensor, cut along its first dimension; without sizes into equal ones."""
        check(output, tensor)
        land, source = staging_tensor(output), plain(tensor)
        task = self.all_to_all(self._cut(land, output_sizes), self._cut(source, sizes))
        return CollectiveCall("all_to_all_single", task.operations, [output], copies([(output, land)]))

    def _cut(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        if not sizes:
            if tensor.size(0) % self.world:
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
            sizes = [tensor.size(0) // self.world] * self.world
        elif len(sizes) != self.world:
            raise RuntimeError(f"Number of tensor splits not equal to group size: {len(sizes)} for {self.world} ranks")
        if sum(sizes) != tensor.size(0):
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        return list(tensor.split_with_sizes(list(sizes)))

    def barrier(self) -> CollectiveCall:
        """Ends when all have called it."""
        operation: Operation = Barrier(self.rank, self.world)
        return CollectiveCall("barrier", [operation])

    def send(self, tensor: Tensor, to: int) -> CollectiveCall:
        """Ends when the other rank has it."""
        check(tensor)
        operation = TensorExchange(
            f"send {self.rank} {to}", self.rank, self.world, to={to: plain(tensor)}, receipts=True, peers=[to]
        )
        return CollectiveCall(f"send to rank {to}", [operation], [tensor])

    def receive(self, tensor: Tensor, source: int) -> CollectiveCall:
        """What the other rank sends."""
        check(tensor)
        land = staging_tensor(tensor)
        operation = TensorExchange(
            f"send {source} {self.rank}", self.rank, self.world, into={source: land}, receipts=True, peers=[source]
        )
        return CollectiveCall(f"receive from rank {source}", [operation], [tensor], copies([(tensor, land)]))

    def _check_count(self, what: str, given: Sequence[object]) -> None:
        if len(given) != self.world:
            raise ValueError(f"{what}: expected {self.world} tensors, one for each rank, got {len(given)}")


def _check_dtypes(tensors: Sequence[Tensor], like: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != like.dtype:
            raise ValueError(f"tensors of one collective have one dtype, got {tensor.dtype} and {like.dtype}")


def _put(land: Tensor, source: Tensor) -> None:
    """The own part, which does not travel."""
    if not same_memory(land, source):
        land.copy_(source.view(land.shape))


def _own_part(land: Tensor, source: Tensor) -> Callable[[], object] | None:
    """What is to be called to put the own part in its place, when the others' is on its way: they need not wait for it.
    A large part is put there at once, as the collective can take nothing in meanwhile."""
    if source.nbytes > _OWN_LATER_BYTES:
        _put(land, source)
        return None
    if same_memory(land, source):
        return None
    return partial(land.copy_, source if source.shape == land.shape else source.view(land.shape))

"""A lane for NCCL: a CUDA stream that runs native collectives."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm.accounting import Traffic
from ddp_hooks.comm.algorithms.collectives import Partition
from ddp_hooks.comm.algorithms.encoded import add_encoded, encode_for_peers, encode_own, read_gathered, sum_bytes
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv
from ddp_hooks.comm.algorithms.scratch import Scratch
from ddp_hooks.comm.executors.work import StreamWork, Work
from ddp_hooks.comm.torch_compat.distributed import all_gather_single, reduce_scatter_single
from ddp_hooks.comm.torch_compat.overrides import copy_all
from ddp_hooks.comm.wire.exact import BLOCK
from ddp_hooks.comm.wire.exact_native import ExactNativeWire
from ddp_hooks.comm.wire.narrow import NarrowGather
from ddp_hooks.comm.wire.rounded import DifferenceWire, RoundedWire

_ALIGNMENT_BYTES = 128  # of messages in scratch memory


class StreamLane:
    """Lane for NCCL: one stream, one process group; methods are those of :class:`~.lanes.Lanes`.

    Native collectives work in place on equal ranges. Elements that do not divide evenly travel together, in one small
    all-reduce or broadcast. The stream verbs do nothing on CPU tensors, so the same code is tested on gloo.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.traffic = Traffic()
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def reduce_scatter(self, partitions: Sequence[Partition], label: str, divisor: int = 1) -> StreamWork:
        exact = [(each, each.wire) for each in partitions if isinstance(each.wire, ExactNativeWire)]
        for _, wire in exact:
            wire.begin_turn()
        with self._submitting(f"reduce-scatter of {label}") as work:
            for partition in partitions:
                if isinstance(partition.wire, RoundedWire):
                    self._encoded_reduce_scatter(partition, partition.wire, divisor)
            flags = []
            for partition, wire in exact:
                if wire.narrow is not None:
                    flags.append((wire, self._exact_reduce_scatter(partition, wire, divisor)))
                elif wire.looks:
                    flags.append((wire, wire.look(partition.flat)))
            self._share_flags(flags, work.label)
            plain = [each for each in partitions if each.wire is None]
            plain += [each for each, wire in exact if wire.narrow is None]
            for body, own in self._bodies(plain):
                reduce_scatter_single(own, body, group=self._group)
                if divisor > 1:
                    own.div_(divisor)
            tails = self._tails(plain)
            if tails:
                joined = torch.cat(tails)
                dist.all_reduce(joined, group=self._group)
                if divisor > 1:
                    joined.div_(divisor)
                copy_all(tails, joined.split([tail.numel() for tail in tails]))
        self._count(plain)
        return work

    def all_gather(self, partitions: Sequence[Partition], label: str, after: Collection[Work] = ()) -> StreamWork:
        with self._submitting(f"all-gather of {label}", after) as work:
            for partition in partitions:
                if isinstance(partition.wire, (RoundedWire, DifferenceWire)):
                    self._encoded_all_gather(partition, partition.wire)
                elif isinstance(partition.wire, NarrowGather) and self._world_size > 1:
                    self._gather_narrow(partition.flat, list(itertools.pairwise(partition.bounds)), partition.wire)
            plain = [partition for partition in partitions if partition.wire is None]
            for body, own in self._bodies(plain):
                all_gather_single(body, own, group=self._group)
            tails = self._tails(plain)
            if tails:
                joined = torch.cat(tails)
                dist.broadcast(joined, group=self._group, group_src=self._world_size - 1)
                copy_all(tails, joined.split([tail.numel() for tail in tails]))
        self._count([each for each in partitions if not isinstance(each.wire, DifferenceWire)])
        return work

    def _encoded_reduce_scatter(self, partition: Partition, wire: RoundedWire, divisor: int) -> None:
        """Send every range to its owner in an all-to-all; see :func:`~..algorithms.encoded.encoded_reduce_scatter`."""
        rank, codec, chunks = self._rank, wire.codec, partition.ranges
        residuals = None if wire.residual is None else partition._replace(flat=wire.residual).ranges
        to_send = [0 if peer == rank else codec.nbytes(chunk.numel()) for peer, chunk in enumerate(chunks)]
        to_receive = [0 if peer == rank else codec.nbytes(chunks[rank].numel()) for peer in range(len(chunks))]
        outgoing, incoming = (partition.flat.new_empty(sum(n), dtype=torch.uint8) for n in (to_send, to_receive))
        encode_for_peers(chunks, rank, codec, outgoing.split(to_send), residuals)
        dist.all_to_all_single(incoming, outgoing, to_receive, to_send, group=self._group)
        residual = None if residuals is None else residuals[rank]
        space = Scratch(partition.flat.new_empty(sum_bytes(chunks[rank]), dtype=torch.uint8))
        add_encoded(chunks[rank], rank, incoming.split(to_receive), codec, residual, space, divisor)
        self._count_bytes(sum(to_send), sum(to_receive))

    def _exact_reduce_scatter(self, partition: Partition, wire: ExactNativeWire, divisor: int) -> Tensor:
        """Send every range to its owner in 16 bits, which adds in the order of ranks; return this rank's flags."""
        message, low_of_wide, flags = wire.encode(partition.flat)
        messages = self._send_to_owners(message, wire.message_numels)
        low_of_wide = self._send_to_owners(low_of_wide, [BLOCK * number for number in wire.num_wide])
        own = partition.ranges[self._rank]
        wire.add(messages, low_of_wide, self._rank, own)
        if divisor > 1:
            own.div_(divisor)
        return flags

    def _send_to_owners(self, outgoing: Tensor, numels: Sequence[int]) -> Tensor:
        """Return what all ranks sent to this one, where they send ``numels[r]`` elements to rank r."""
        own, others = numels[self._rank], self._world_size - 1
        incoming = outgoing.new_empty(self._world_size * own)
        if outgoing.numel():
            sizes = [numel * outgoing.element_size() for numel in numels]
            messages = incoming.view(torch.uint8), outgoing.view(torch.uint8)  # NCCL has no int16
            dist.all_to_all_single(*messages, [sizes[self._rank]] * len(sizes), sizes, group=self._group)
            self._count_bytes(sum(sizes) - sizes[self._rank], sizes[self._rank] * others)
        return incoming

    def _share_flags(self, flags: Sequence[tuple[ExactNativeWire, Tensor]], label: str) -> None:
        """Form the maximum of flags over the ranks, and let each wire read it on the host in its next turn."""
        if not flags or self._world_size == 1:
            return
        joined = torch.cat([each for _, each in flags])
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=self._group)
        self._count_bytes(*[2 * joined.nbytes * (self._world_size - 1) // self._world_size] * 2)
        host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=self._stream is not None)
        host.copy_(joined, non_blocking=True)
        copied = self._stream.record_event() if self._stream is not None else None
        for (wire, _), part in zip(flags, host.split([each.numel() for _, each in flags]), strict=True):
            wire.keep(part, copied, label)

    def _encoded_all_gather(self, partition: Partition, wire: RoundedWire | DifferenceWire) -> None:
        """Gather payloads, padded to one length; see :func:`~..algorithms.encoded.encoded_all_gather`."""
        chunks, rank = partition.ranges, self._rank
        sizes = [wire.codec.nbytes(chunk.numel()) for chunk in chunks]
        longest = max(sizes)
        gathered = partition.flat.new_empty(len(chunks) * longest, dtype=torch.uint8)
        own = gathered.new_zeros(longest)
        encode_own(chunks[rank], wire, own[: sizes[rank]])
        all_gather_single(gathered, own, group=self._group)
        payloads = [each[:size] for each, size in zip(gathered.view(len(chunks), longest), sizes, strict=True)]
        read_gathered(chunks, rank, wire, payloads)
        self._count_bytes(longest * (len(chunks) - 1), longest * (len(chunks) - 1))

    def run(
        self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None
    ) -> StreamWork:
        """Run ``algorithm`` as batches of point-to-point messages, which have no tags."""
        with self._submitting(f"exchange of {label}", after) as work:
            for next_round in algorithm:
                operations = []
                for exchange in next_round:
                    post = dist.irecv if isinstance(exchange, Recv) else dist.isend
                    operations.append(dist.P2POp(post, exchange.tensor, group=self._group, group_peer=exchange.peer))
                for request in dist.batch_isend_irecv(operations) if operations else []:
                    request.wait()
                for exchange in next_round:
                    self.traffic.count(exchange)
                self.traffic.rounds += 1
        return work

    def all_reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> StreamWork:
        """Reduce a few numbers natively, in place."""
        with self._submitting(f"sum of {label}") as work:
            if self._world_size > 1:
                dist.all_reduce(value, op, group=self._group)
        return work

    @property
    def is_idle(self) -> bool:
        """True if nothing is under way on the stream."""
        return self._stream is None or self._stream.query()

    def close(self, unfinished: bool = False) -> None:
        """Do nothing: a stream has no thread to end; see :attr:`is_idle`."""

    @contextmanager
    def _submitting(self, label: str, after: Collection[Work] = ()) -> Iterator[StreamWork]:
        work, stream = StreamWork(label, self._device), self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))  # data were written there
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for other in after:
                other.wait()
            yield work
            if stream is not None:
                work.event = stream.record_event()

    def _gather_narrow(self, flat: Tensor, ranges: Sequence[tuple[int, int]], wire: NarrowGather) -> None:
        sizes = [wire.nbytes(*each) for each in ranges]
        room = -(-max(sizes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES  # equal for all ranks
        messages = torch.empty(self._world_size, room, dtype=torch.uint8, device=flat.device)
        own = messages[self._rank]
        wire.encode(flat, *ranges[self._rank], own[: sizes[self._rank]])
        all_gather_single(messages.view(-1), own, group=self._group)
        for rank, (start, end) in enumerate(ranges):
            if rank != self._rank:
                wire.decode(messages[rank, : sizes[rank]], flat, start, end)

    def _bodies(self, partitions: Sequence[Partition]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the equal ranges of each partition, and this rank's of them, if they move."""
        for flat, bounds, _ in partitions:
            share = bounds[1] - bounds[0]
            if share and self._world_size > 1:
                yield flat[: share * self._world_size], flat[share * self._rank : share * (self._rank + 1)]

    def _tails(self, partitions: Sequence[Partition]) -> list[Tensor]:
        if self._world_size == 1:
            return []
        tails = [flat[bounds[1] * self._world_size :] for flat, bounds, _ in partitions]
        return [tail for tail in tails if tail.numel()]

    def _count(self, partitions: Sequence[Partition]) -> None:
        nbytes = sum(partition.nbytes for partition in partitions) * (self._world_size - 1) // self._world_size
        self._count_bytes(nbytes, nbytes)

    def _count_bytes(self, sent: int, received: int) -> None:
        self.traffic.sent_bytes += sent
        self.traffic.received_bytes += received
        self.traffic.rounds += self._world_size - 1

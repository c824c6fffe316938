"""The order of work on a device, checked without a device: streams that keep vector clocks instead of CUDA's.

Every access of the engine's memory is noted with the clock of the stream that makes it. An access must come after the writes
that it depends on, in the order that waiting streams establish, and memory that was freed may be written again only after
all that was done with it: the caching allocator hands a stream's memory to that stream again at once.
"""

import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_backend
from tests.on_torch.helpers.models import Block, build_net, loss_of
from tests.ranks import RankError


def _key(tensor):
    """Which memory it is in."""
    return tensor.untyped_storage()._cdata


class Stream:
    """A queue, as the set of all work that lies before its end: how much of each stream."""

    names = itertools.count()

    def __init__(self, of=None):
        self.name = f"stream {next(self.names)}"
        self.clock, self.device = {self: 0}, of

    def __enter__(self):
        self.before, self.device.current = self.device.current, self

    def __exit__(self, *_):
        self.device.current = self.before

    def work(self):
        """Queue something. Returns the moment when it is done."""
        self.clock[self] += 1
        return self, self.clock[self]

    def record_event(self):
        self.work()
        return Event(self.clock, self.device)

    def wait_event(self, event):
        for stream, count in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other):
        self.wait_event(other)

    def synchronize(self):
        pass

    def knows(self, moment):
        stream, count = moment
        return self.clock.get(stream, 0) >= count


class Event:
    """A moment of a stream. The host may wait for it."""

    num_waits = 0

    def __init__(self, clock, of):
        self.clock, self.device = dict(clock), of

    def wait(self):
        self.device.current.wait_event(self)

    def synchronize(self):
        Event.num_waits += 1


class Device:
    """What torch.accelerator would be, with one computing stream, and memory that is watched."""

    def __init__(self):
        self.computing, self.nccl = Stream(self), Stream(self)
        self.current = self.computing
        self.writes, self.reads, self.pools, self.debts = {}, {}, {}, {}
        self.freed, self.lasting, self.kept_back = {}, {}, set()
        self.problems = []
        self.num_accesses = self.most_held = 0

    def current_stream(self, device=None):
        return self.current

    def access(self, tensor, what, *, write, on=None):
        """Something is queued that reads or writes a tensor's memory."""
        stream = on or self.current
        key = self.known(tensor)
        self.num_accesses += 1
        after = self.writes.get(key, []) + (self.reads.get(key, []) if write else [])
        if key in self.debts:
            after = after + self.debts.pop(key)
        for moment, before in after:
            if not stream.knows(moment):
                self.problems.append(f"{what} does not wait for {before}")
        moment = stream.work()
        if write:
            self.writes[key], self.reads[key] = [(moment, what)], []
        else:
            self.reads.setdefault(key, []).append((moment, what))

    def last(self, tensor):
        """It is not allocated and freed in a step."""
        self.lasting[_key(tensor)] = (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)

    def known(self, tensor):
        """The memory it lies in; a slice of a lasting tensor may have a storage of its own."""
        at = tensor.data_ptr()
        return next((key for key, (start, stop) in self.lasting.items() if start <= at < stop), _key(tensor))

    def allocated(self, tensor):
        """From the current stream's pool, where it may be any memory that has been freed there."""
        key = _key(tensor)
        self.writes.pop(key, None), self.reads.pop(key, None)
        self.pools[key] = self.current
        self.debts[key] = list(self.freed.get(self.current, []))

    def free(self, key):
        """Back to its pool, at once; or, for a stream that it was recorded for, once that is through."""
        if key in self.kept_back:
            self.kept_back.discard(key)
            for moments in (self.pools, self.writes, self.reads):
                moments.pop(key, None)
            return
        self.freed.setdefault(self.pools.pop(key), []).extend(self.writes.pop(key, []) + self.reads.pop(key, []))


class Work:
    def __init__(self, device):
        self.device = device

    def wait(self):
        self.device.current.wait_stream(self.device.nccl)
        return True


def _watch(device):
    """Let the engine queue on the device's streams, and note what it does with memory. Returns what undoes it."""
    from torch_backend.engine import _bucket as bucket
    from torch_backend.engine import _step_hooks as executor
    from torch_backend.memory._gather import GatherBuffer
    from torch_backend.memory._grad_reduction import GradStore
    from torch_backend.memory._reshard_group import ReshardGroupShard
    from torch_backend.memory._store import ShardStore
    from torch_backend.memory._streams import DeviceStreams
    from torch_backend.param_registration import _original
    from torch_backend.ranks._collectives import Communicator

    with pytest.MonkeyPatch.context() as instead:
        instead.setattr(torch.accelerator, "current_stream", device.current_stream)
        instead.setattr(torch, "Stream", lambda *_, **__: Stream(device))
        streams = DeviceStreams(torch.device("cpu"))
    undo, parts = [], {}  # what is undone at the end; shards of reshard groups, until they are gathered

    def patch(owner, name, make):
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, make(getattr(owner, name)))

    def collective(original):
        def issue(self, target, source=None, **names):
            original(self, *[t for t in (target, source) if t is not None], **names).wait()
            if original.__name__ == "all_gather":
                if _key(source) not in device.lasting and _key(source) not in device.pools:  # cast for this gather
                    device.allocated(source)
                    device.access(source, "casting a shard", write=True)
                    weakref.finalize(source, device.free, _key(source))
                if _key(target) not in device.pools:
                    device.allocated(target)
            device.nccl.wait_stream(device.current)
            if source is not None:
                device.access(source, "a collective reading", write=False, on=device.nccl)
            device.access(target, "a collective writing", write=True, on=device.nccl)
            return Work(device)

        return issue

    def start(original):
        def start(self, *args, **names):
            if self.is_shard:
                return original(self, *args, **names)
            part = parts.pop(_key(args[0]), None)
            if part is None:
                device.last(args[0])
            with streams._unshard:
                if self.layout.contiguous:
                    device.allocated(self.full)
                if self._converts:
                    device.access(args[0], "casting reading a shard", write=False)
            original(self, *args, **names)
            if part is not None:  # which ends with its gather
                part.detach()
                weakref.finalize(self._sent, device.free, _key(self._sent))

        return start

    def finish(original):
        def finish(self):
            landing = self._landing
            if landing is not None:
                self._wait()
                device.allocated(self.full)
                device.access(landing, "the copy-out reading", write=False)
                device.access(self.full, "the copy-out writing", write=True)
            original(self)
            if landing is not None:
                device.free(_key(landing))

        return finish

    def free(original):
        def free(self):
            held = not self.is_shard and self.full.untyped_storage().nbytes() > 0
            original(self)
            key = _key(self.full)
            if held and key in device.pools:
                device.free(key)

        return free

    def collect(original):
        def collect(self, *args, **names):
            full = original(self, *args, **names)
            device.most_held = max(device.most_held, 1 + len(streams._held))
            device.allocated(full)
            device.access(full, "collecting gradients", write=True)
            weakref.finalize(full, device.free, _key(full))
            return full

        return collect

    def take(original):
        def take(self, full, views):
            original(self, full, views)
            device.access(full, "keeping a reshard group's shard, reading", write=False)
            device.allocated(self.buffer)
            device.access(self.buffer, "keeping a reshard group's shard", write=True)
            parts[_key(self.buffer)] = weakref.finalize(self.buffer, device.free, _key(self.buffer))

        return take

    def adopted(original):
        def adopted(*args):
            original(*args)
            piece = args[0].pieces[args[1]] if isinstance(args[0], ShardStore) else args[1]
            device.access(piece, "adopting assigned data", write=True)

        return adopted

    patch(_original, "adopt_data", adopted)
    patch(ShardStore, "take", adopted)
    patch(torch.Tensor, "record_stream", lambda _: lambda tensor, stream: device.kept_back.add(_key(tensor)))
    for module in (bucket, executor):
        patch(module, "streams_of", lambda _: lambda _: streams)
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        patch(Communicator, name, collective)
    patch(GatherBuffer, "start", start)
    patch(GatherBuffer, "finish", finish)
    patch(GatherBuffer, "free", free)
    patch(GradStore, "_collect", collect)
    patch(ReshardGroupShard, "take", take)
    return streams, lambda: [setattr(*entry) for entry in reversed(undo)]


def _sharded(model, api):
    if api == "fsdp1":
        return torch_backend.FullyShardedDataParallel(
            model,
            auto_wrap_policy=torch_backend.ModuleWrapPolicy({Block}),
            mixed_precision=torch_backend.MixedPrecision(torch.bfloat16, torch.float32),
            use_orig_params=True,
        )
    options = {}
    if api == "fsdp2 group":
        options["reshard_after_forward"] = 2
    if api == "fsdp2 hybrid":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options["mp_policy"] = torch_backend.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        torch_backend.fully_shard(block, **options)
    torch_backend.fully_shard(model, **options)
    if api == "fsdp2 buffers":
        model.set_reduce_scatter_max_input_buffers(3)
    return model


def _run(rank, world_size, api, fault):
    device = Device()
    streams, undo = _watch(device)
    torch.manual_seed(0)
    try:
        model = build_net(depth=4)
        linears = [module for module in model.modules() if isinstance(module, nn.Linear | nn.LayerNorm)]
        model = _sharded(model, api)
        if fault:
            instead = {"settle": lambda work: work, "before_collect": lambda: streams._held.clear()}
            setattr(streams, fault, instead.get(fault, lambda *_, **__: None))
        for module in linears:
            module.register_forward_hook(lambda m, *_: device.access(m.weight, "forward reading", write=False))
            module.register_full_backward_hook(lambda m, *_: device.access(m.weight, "backward reading", write=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if step == 2:
                for param in model.parameters():
                    param.data = param.data * 0.5
            loss = loss_of(model, step, rank)
            loss.backward()
            for param in model.parameters():
                if param.grad is not None:
                    grad = getattr(param.grad, "_local_tensor", param.grad)
                    device.access(grad, "the optimizer reading a gradient", write=False)
                    device.access(getattr(param, "_local_tensor", param), "the optimizer writing", write=True)
            optimizer.step()
            optimizer.zero_grad()
        return sorted(set(device.problems)), device.num_accesses, Event.num_waits, device.most_held
    finally:
        undo()


# API, with what needs other waits: shards of 2 of the 4 ranks between forward and backward (R08), three buffers of collected
# gradients, 2 replicas of 2 shards. Ranks, and how many such buffers are held at most.
APIS = {"fsdp1": (2, 1), "fsdp2": (2, 1), "fsdp2 group": (4, 1), "fsdp2 buffers": (2, 3), "fsdp2 hybrid": (4, 1)}


@pytest.mark.parametrize("api", APIS)
def test_streams_wait_for_what_they_use(ranks, api):
    world_size, held = APIS[api]
    for problems, num_accesses, num_waits, most_held in ranks.run(world_size, _run, api, None):
        assert problems == []
        assert num_accesses > 250 and num_waits > 0  # the host does not run ahead
        assert most_held == held


FAULTS = ["shards_written", "settle", "before_collect", "begin_reduction", "end_reductions", "before_free"]


@pytest.mark.parametrize(
    ("api", "fault"),
    [
        *itertools.product(["fsdp1", "fsdp2"], FAULTS),
        ("fsdp2 group", "gather_after"),
        ("fsdp2 group", "before_free"),
        ("fsdp2 buffers", "before_collect"),
        ("fsdp2 hybrid", "end_reductions"),
        ("fsdp2 hybrid", "begin_reduction"),
    ],
)
def test_every_wait_is_needed(ranks, api, fault):
    """Without any one of them the check above fails. FSDP2 casts nothing here, so that no memory ends with its gather."""
    if (api, fault) == ("fsdp2", "settle"):
        return
    try:
        for problems, *_ in ranks.run(APIS[api][0], _run, api, fault):
            assert problems
    except RankError as error:
        assert fault == "begin_reduction" and "reduction_read" in str(error)  # of memory that was never held

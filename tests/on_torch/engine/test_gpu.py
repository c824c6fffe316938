"""On GPUs: both APIs over NCCL beside torch's, and the parity run. Skipped where there is no CUDA device."""

import json
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch

import torch_backend
from tests.on_torch.helpers.interfaces import APIS, OPTIONS, local_tensor
from tests.on_torch.helpers.models import Block, build_net, loss_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# Two ranks where there are two GPUs: then sums are the same in either order. One rank alone has nothing to sum.
WORLD_SIZE = min(2, torch.cuda.device_count())


def _loss(model, step, rank):
    """The loss of a model on the GPU, whose inputs come from the CPU."""
    return loss_of(_OnCpu(model), step, rank)


class _OnCpu(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        assert tokens.device.type == "cpu"
        return self.model(tokens).cpu()


def _train(rank, world_size, api, options):
    histories = []
    for wrap in APIS[api]:
        model = wrap(build_net().cuda(), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        history = []
        for step in range(5):
            loss = _loss(model, step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append((loss.item(), [local_tensor(p).flatten().cpu() for p in model.parameters() if p.numel()]))
        histories.append(history)
    for (loss_a, params_a), (loss_b, params_b) in zip(*histories, strict=True):
        assert loss_a == loss_b
        assert torch.equal(torch.cat(params_a), torch.cat(params_b))
    return True


@pytest.mark.parametrize(("api", "options"), OPTIONS)
def test_R26_nccl_bit_for_bit(ranks, api, options):
    assert all(ranks.run(WORLD_SIZE, _train, api, options, backend="nccl"))


@pytest.mark.parametrize(("api", "options"), OPTIONS)
def test_R26_two_gloo_ranks_on_one_device_bit_for_bit(ranks, api, options):
    """Both ranks compute on the current device, whose sums of two are the same in either order."""
    assert all(ranks.run(2, _train, api, options, backend="gloo"))


def _settings(api):
    """Arguments of FSDP1's constructor that say something on a device alone, or say it otherwise there."""
    low = api.MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    return {
        "no_shard": {"sharding_strategy": api.ShardingStrategy.NO_SHARD},
        "bfloat16": {"mixed_precision": low, "use_orig_params": True},
        "offload": {"cpu_offload": api.CPUOffload(True), "use_orig_params": True},
        "offload_bfloat16": {"cpu_offload": api.CPUOffload(True), "mixed_precision": low},
        "post": {"backward_prefetch": api.BackwardPrefetch.BACKWARD_POST},
        "forward_prefetch": {"forward_prefetch": True, "backward_prefetch": None},
        "unlimited": {"limit_all_gathers": False},
        "accumulated": {},
    }


SETTINGS = [
    "no_shard",
    "bfloat16",
    "offload",
    "offload_bfloat16",
    "post",
    "forward_prefetch",
    "unlimited",
    "accumulated",
]


def _configured(rank, world_size, setting):
    """Losses and what is left of the parameters after 5 steps with clipping, ours beside torch's."""
    import torch.distributed.fsdp as theirs
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    ends = []
    for api, policy in ((theirs, ModuleWrapPolicy({Block})), (torch_backend, torch_backend.ModuleWrapPolicy({Block}))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = api.FullyShardedDataParallel(
                build_net(width=33, depth=6),
                auto_wrap_policy=policy,
                device_id=torch.cuda.current_device(),
                **_settings(api)[setting],
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        end = []
        for step in range(5):
            with model.no_sync() if setting == "accumulated" and step % 2 == 0 else nullcontext():
                loss = _loss(model, step, rank)
                loss.backward()
            if setting != "accumulated" or step % 2:
                end.append(float(model.clip_grad_norm_(1.0)))
                optimizer.step()
                optimizer.zero_grad()
            end.append(loss.item())
        with api.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            end += [param.detach().cpu().clone() for param in model.parameters()]
        ends.append(end)
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (setting, a, b)
    return True


@pytest.mark.parametrize("setting", SETTINGS)
def test_R14_R16_R33_settings_over_nccl_bit_for_bit(ranks, setting):
    assert all(ranks.run(WORLD_SIZE, _configured, setting, backend="nccl"))


@pytest.mark.parametrize("setting", SETTINGS)
def test_R14_R16_R33_settings_of_two_ranks_on_one_device_bit_for_bit(ranks, setting):
    assert all(ranks.run(2, _configured, setting, backend="gloo"))


def _memory(rank, world_size):
    """Bytes that stay allocated after a step, beside the shards."""
    build_net(width=256).cuda()(torch.zeros(4, 6, dtype=torch.long, device="cuda")).sum().backward()
    # What cuBLAS keeps as its workspace.
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = APIS["fsdp1"][1](build_net(width=256).cuda(), strategy="FULL_SHARD", use_orig_params=True)
    _loss(model, 0, rank).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    shards = sum(bucket.store.buffer.nbytes for _, buckets in _units(model) for bucket in buckets)
    return torch.cuda.memory_allocated() - before - shards


def _units(model):
    from torch_backend.shards import sharded_units

    return sharded_units(model)


def test_R14_full_parameters_are_freed(ranks):
    # What else is allocated is small: buffers, and the allocator's rounding of each tensor to 512 bytes.
    assert all(left < 1 << 20 for left in ranks.run(2, _memory, backend="gloo"))


def test_parity_on_gpus(tmp_path):
    command = [sys.executable, "-m", "experiments", "parity", "gpt-tiny", "--device", "cuda", "--steps", "5"]
    command += ["--world-size", str(WORLD_SIZE), "--output", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] in ("equal", "rounding")

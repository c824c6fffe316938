"""The trainers that people have, with torch_backend instead of torch's FSDP: accelerate, transformers' Trainer and
lightning's Fabric, on 2 ranks, beside plain models.

accelerate shards on accelerators alone; here it is told that it may on the CPU, by the two lines that decide it.
"""

# pyright: reportArgumentType=false

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.on_torch.helpers.models import Block, build_net, loss_of
from tests.on_torch.helpers.sharded_and_plain import CLOSE, backward_of_both, differing, full, refusal, shard
from torch_backend import FSDPModule, fully_shard, replace_torch_fsdp
from torch_backend import FullyShardedDataParallel as FSDP

MAX_NORM = 0.5
SECONDS = 180  # the first test of a world imports the library


@contextmanager
def launched(rank: int, world_size: int, *, ours: bool = True) -> Iterator[str]:
    """What a launcher says in the environment; a folder that all ranks have; if `ours`, torch_backend in torch's place."""
    before = dict(os.environ)
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in local.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    try:
        with tempfile.TemporaryDirectory() as own, replace_torch_fsdp() if ours else nullcontext():
            folders = [None] * world_size
            dist.all_gather_object(folders, own)
            yield str(folders[0])
            dist.barrier()
    finally:
        os.environ.clear()
        os.environ.update(before)


def plain_run(steps: int) -> nn.Module:
    """A plain model after clipped steps, in float64."""
    model = build_net(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        backward_of_both(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _wrong(model: nn.Module, plain: nn.Module) -> list[str]:
    return differing(full(model), full(plain))


# accelerate


def allow_cpu() -> None:
    """accelerate shards on accelerators alone: let it take the CPU's process group for one of these."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def forget_accelerate() -> None:
    """Its state is the process's."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def _accelerated(rank, world_size, version, kind, api):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with launched(rank, world_size) as folder:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="NO_WRAP" if api else "TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=None if api else ["Block"],
            cpu_ram_efficient_loading=False,
            state_dict_type=kind,
            use_orig_params=True if version == 1 else None,
        )
        allow_cpu()
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model: Any = build_net(torch.float64)
        if api:
            model = shard(model, api)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)

        def step(number):
            accelerator.backward(loss_of(model, number, rank))
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        accelerator.save_state(folder)
        step(1)
        wrong = _wrong(model, plain_run(2))
        accelerator.load_state(folder)
        step(1)
        wrong += _wrong(model, plain_run(2))
        state = accelerator.get_state_dict(model)
        if rank == 0:
            plain = plain_run(2).state_dict()
            wrong += [name for name in plain if not torch.allclose(state[name], plain[name], **CLOSE)]
        unwrapped = type(accelerator.unwrap_model(model)).__name__
        units = sum(isinstance(module, FSDP if version == 1 else FSDPModule) for module in model.modules())
        forget_accelerate()
        return wrong, unwrapped, units


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize(
    ("version", "kind", "api"),
    [
        (1, "SHARDED_STATE_DICT", ""),
        (1, "FULL_STATE_DICT", "flat"),
        (2, "SHARDED_STATE_DICT", ""),
        (2, "FULL_STATE_DICT", "per_param"),
    ],
)
def test_R36_R37_accelerate_shards_trains_clips_saves_and_resumes(ranks, version, kind, api):
    """What is sharded already (`api`) is left as it is."""
    found = ranks.run(2, _accelerated, version, kind, api, seconds=SECONDS)
    assert found == [([], "Net" if version == 1 else "FSDPNet", 4)] * 2


def _accelerated_pieces(rank, world_size):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with launched(rank, world_size):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
        )
        allow_cpu()
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = shard(build_net(), "ragged layout")
        said = refusal(
            lambda: accelerator.prepare(model, torch.optim.AdamW(model.parameters())), "accelerate", "per_param"
        )
        forget_accelerate()
    return said


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_is_refused_pieces_which_it_would_take_for_one_parameter(ranks):
    assert ranks.run(2, _accelerated_pieces, seconds=SECONDS) == ["", ""]


# transformers


class _Texts(torch.utils.data.Dataset):
    """Eight rows of bytes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": row, "labels": row}


def _tiny() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=16, n_embd=20, n_layer=2, n_head=2, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config)


def _trained_by_trainer(rank, world_size, version, kind, ours, wrapped):
    """What a model holds after 2 steps; and where another trainer, that resumes after 1, ends elsewhere."""
    from transformers import Trainer, TrainingArguments

    config = {
        "version": version,
        "state_dict_type": kind,
        "auto_wrap_policy": "NO_WRAP" if wrapped else "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": None if wrapped else ["GPT2Block"],
        "sync_module_states": False,  # where accelerate asks for a GPU
    }
    finals = []
    with launched(rank, world_size, ours=ours) as folder:
        for resume in (None, os.path.join(folder, "checkpoint-1")) if ours else (None,):
            model = _tiny().double()
            if wrapped:
                for module in (*model.transformer.h, model):
                    fully_shard(module)
            arguments = TrainingArguments(
                folder,
                use_cpu=True,
                fsdp=True,
                fsdp_config=dict(config),
                max_steps=2,
                save_steps=1,
                per_device_train_batch_size=1,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                max_grad_norm=MAX_NORM,
                report_to=[],
                disable_tqdm=True,
                logging_strategy="no",
            )
            allow_cpu()
            trainer: Any = Trainer(model, arguments, train_dataset=_Texts())
            trainer.train(resume_from_checkpoint=resume)
            finals.append(full(trainer.model_wrapped))
            forget_accelerate()
        kinds = FSDP if version == 1 else FSDPModule
        units = sum(isinstance(module, kinds) for module in trainer.model_wrapped.modules())
    return finals[0], differing(finals[-1], finals[0]), units


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("accelerate") is None or find_spec("transformers") is None, reason="not installed")
def test_R36_R37_transformers_trainer_trains_saves_and_resumes(ranks):
    """As with torch's own FSDP2, and under FSDP1 too; a model that is sharded already is left as it is.

    Not under FSDP1 with SHARDED_STATE_DICT, with torch's or with ours: accelerate loads into what optim_state_dict says of a new
    optimizer, which has no state.
    """
    theirs = ranks.run(2, _trained_by_trainer, 2, "FULL_STATE_DICT", False, False, seconds=SECONDS)
    for case in (
        (1, "FULL_STATE_DICT", True, False),
        (2, "FULL_STATE_DICT", True, False),
        (2, "SHARDED_STATE_DICT", True, True),
    ):
        for (expected, _, _), (found, resumed, units) in zip(
            theirs, ranks.run(2, _trained_by_trainer, *case), strict=True
        ):
            # In the bias of attention's keys, whose gradient is zero but for rounding, AdamW makes steps of that.
            assert [name for name in differing(found, expected) if not name.endswith("c_attn.bias")] == [], case
            assert (resumed, units > 2) == ([], True), case


# lightning


def _trained_by_fabric(rank, world_size, api, kind):
    """How far from the plain model, after two steps, and after a second one that is taken again from a checkpoint."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.fsdp import FSDPStrategy
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

    class OnCpu(FSDPStrategy):
        """lightning refuses the class itself where there is no GPU."""

    def parallelize(model, mesh):
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["data_parallel"])
        return model

    with launched(rank, world_size) as folder:
        os.environ.update(TORCHELASTIC_RUN_ID="a run", GROUP_RANK="0")  # so it takes the ranks that there are
        if api in ("orig", "flat"):
            strategy: Any = OnCpu(auto_wrap_policy={Block}, state_dict_type=kind, use_orig_params=api == "orig")
        else:
            strategy = ModelParallelStrategy(parallelize, world_size, 1, save_distributed_checkpoint=kind == "sharded")
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision="32-true")
        fabric.launch()
        model = fabric.setup_module(build_net())
        optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        plain, far = full(plain_run(2)), []

        def step(number):
            fabric.backward(loss_of(model, number, rank))
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            found = full(model._forward_module)
            far.append(max(float((found[name] - plain[name]).abs().max()) for name in plain))

        step(0)
        path = os.path.join(folder, "checkpoint")
        fabric.save(path, {"model": model, "optimizer": optimizer})
        step(1)
        fabric.load(path, {"model": model, "optimizer": optimizer})
        step(1)
        units = sum(isinstance(module, FSDP | FSDPModule) for module in model.modules())
    return far[1:], units


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize(
    ("api", "kind"),
    [
        pytest.param("orig", "sharded", marks=pytest.mark.exhaustive),
        pytest.param("flat", "full", marks=pytest.mark.exhaustive),
        pytest.param("per_param", "full", marks=pytest.mark.exhaustive),
        ("per_param", "sharded"),
    ],
)
def test_R36_R37_lightnings_fabric_shards_trains_clips_saves_and_resumes(ranks, api, kind):
    for far, units in ranks.run(2, _trained_by_fabric, api, kind, seconds=SECONDS):
        # float32, in steps of 0.01 that AdamW takes by the sign of the gradient, more or less; the same both times.
        assert max(far) < 1e-6
        assert far[0] == far[1]
        assert units == 4

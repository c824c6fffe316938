"""Stages of a pipeline; what they compute is compared in scripts/expert_and_pipeline_parallel.py."""

import torch
from torch.distributed import pipelining

from crossframe.errors import UnsupportedError
from tests.on_torch.helpers.fsdp2_models import linears
from torch_backend import fully_shard, replace_torch_fsdp
from torch_backend.pipelining import PipelineStage


def _cut_backward(rank: int, world_size: int) -> str:
    models = [fully_shard(linears(4, 4)) for _ in range(2)]
    stages = [PipelineStage(model, i, 2, torch.device("cpu")) for i, model in enumerate(models)]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 1, loss_fn=torch.nn.functional.mse_loss)
    try:
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    except UnsupportedError as error:
        return str(error)
    return ""


def test_schedules_that_cut_backwards_in_two_raise(ranks):
    assert "Schedule1F1B" in ranks.run(1, _cut_backward)[0]


def test_scripts_that_import_torchs_stage_get_this_one():
    with replace_torch_fsdp():
        assert pipelining.PipelineStage is PipelineStage
    assert pipelining.PipelineStage is PipelineStage.__base__

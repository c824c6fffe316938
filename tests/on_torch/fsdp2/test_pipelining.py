"""Stages of a pipeline; what they compute is compared in scripts/expert_and_pipeline_parallel.py."""

from torch.distributed import pipelining

from torch_backend import replace_torch_fsdp
from torch_backend.pipelining import PipelineStage


def test_scripts_that_import_torchs_stage_get_this_one():
    with replace_torch_fsdp():
        assert pipelining.PipelineStage is PipelineStage
    assert pipelining.PipelineStage is PipelineStage.__base__

"""What scripts run on: the CPU, or with CROSSFRAME_TESTS_DEVICE=cuda a GPU that all ranks share, over gloo; torch's version."""

import os

import torch

from tests.ranks import DEVICE_OF_TESTS

DEVICE = torch.device(os.environ.get(DEVICE_OF_TESTS, "cpu"))
TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

"""The device on which scripts run: the CPU, or with CROSSFRAME_TESTS_DEVICE=cuda a GPU that all ranks share, over gloo."""

import os

import torch

from tests.ranks import DEVICE_OF_TESTS

DEVICE = torch.device(os.environ.get(DEVICE_OF_TESTS, "cpu"))

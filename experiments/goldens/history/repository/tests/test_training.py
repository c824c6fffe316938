"""The training is that of the golden, up to rounding."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def test_training(training):
    import train

    training.matches("gpt", train.main)

"""The beginning of scripts that train with torch."""

HEAD = """
import sys, torch
from torch import nn
torch.manual_seed(0)
def net():
    return nn.Sequential(nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 11)).double()
tokens = torch.randint(11, (3, 4, 6), generator=torch.Generator().manual_seed(1))
def loss_of(model, x):
    return nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
"""

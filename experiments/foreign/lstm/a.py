"""A language model of torch's own layers: an embedding, two layers of an LSTM in one module, and a linear layer."""

import torch
from torch import nn

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 12)
        self.lstm = nn.LSTM(12, 20, num_layers=2, bias=False, batch_first=True)
        self.head = nn.Linear(20, 40)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


model = LanguageModel()
with torch.no_grad():
    for value in model.parameters():
        value.mul_(2)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 6, 10, vocabulary=40)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]),
)

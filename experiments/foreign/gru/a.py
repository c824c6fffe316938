"""A tagger of torch's own layers: a bidirectional GRU of two layers, trained by Adam on two microbatches, with clipping."""

import torch

from experiments.foreign.shared import STEPS, cross_entropy, halves_of, options, start_torch, tensors_of, tokens_of


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 12)
        self.gru = torch.nn.GRU(12, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(32, 5)

    def forward(self, tokens):
        return self.head(self.gru(self.embedding(tokens))[0])


given = options()
torch.manual_seed(0)
model = Tagger()
start_torch(given, model)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
model.train()
for step in range(STEPS):
    batch = tensors_of(
        {"tokens": tokens_of(step, 8, 10, vocabulary=40), "labels": tokens_of(100 + step, 8, 10, vocabulary=5)}
    )
    total = 0.0
    for half in halves_of(batch):
        loss = cross_entropy(model(half["tokens"]), half["labels"]) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step} loss {total:.12f}")

"""A graph attention network of PyTorch Geometric, a graph for each step: Adam with L2 decay, and a schedule of steps."""

import torch
from torch_geometric.nn.models import GAT

from experiments.foreign.shared import STEPS, graph_of, options, start_torch, tensors_of

given = options()
torch.manual_seed(0)
model = GAT(6, 12, num_layers=3, out_channels=4, heads=3, act="elu", norm="layer_norm", norm_kwargs={"mode": "node"})
start_torch(given, model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
model.train()
for step in range(STEPS):
    graph = tensors_of(graph_of(step))
    optimizer.zero_grad()
    logits = model(graph["nodes"], graph["edges"])
    is_train = graph["is_train"]
    loss = torch.nn.functional.cross_entropy(logits[is_train], graph["labels"][is_train])
    loss.backward()
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")

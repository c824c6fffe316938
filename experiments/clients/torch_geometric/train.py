"""Classifies the nodes of a random graph by a GCN, or random graphs by a GIN, with torch_geometric.

python train.py [--task nodes|graphs] [--sparse] [--cached] [--batch 8] [--accumulate 2] [--mistake]
"""

import argparse

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GCNConv, GINConv, global_add_pool

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=["nodes", "graphs"], default="nodes")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument(
    "--sparse", action="store_true", help="Give GCN a sparse adjacency matrix instead of an edge index."
)
parser.add_argument("--cached", action="store_true", help="Normalise the graph once.")
parser.add_argument("--batch", type=int, default=8, help="Graphs of a microbatch.")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument(
    "--mistake", action="store_true", help="Train on the labels of all nodes, not on the training mask."
)
args = parser.parse_args()

FEATURES, CLASSES = 12, 4


class GCN(torch.nn.Module):
    def __init__(self, hidden_channels):
        super().__init__()
        self.conv1 = GCNConv(FEATURES, hidden_channels, cached=args.cached)
        self.conv2 = GCNConv(hidden_channels, CLASSES, cached=args.cached)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


class GIN(torch.nn.Module):
    def __init__(self, hidden_channels):
        super().__init__()
        self.conv1 = GINConv(MLP([FEATURES, hidden_channels, hidden_channels], norm=None))
        self.conv2 = GINConv(MLP([hidden_channels, hidden_channels, hidden_channels], norm=None), train_eps=True)
        self.mlp = MLP([hidden_channels, hidden_channels, CLASSES], norm=None)

    def forward(self, x, edge_index, batch, batch_size):
        x = self.conv1(x, edge_index).relu()
        x = self.conv2(x, edge_index).relu()
        return self.mlp(global_add_pool(x, batch, size=batch_size))


def random_graph(nodes, edges, generator):
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    x = torch.randn(nodes, FEATURES, generator=generator)
    return T.Compose([T.RemoveSelfLoops(), T.ToUndirected()])(Data(x=x, edge_index=edge_index, num_nodes=nodes))


def train_nodes():
    generator = torch.Generator().manual_seed(1)
    data = random_graph(60, 150, generator)
    data.y = torch.randint(CLASSES, (60,), generator=generator)
    data.train_mask = torch.arange(60) < 30
    if args.sparse:
        data = T.ToSparseTensor(layout=torch.sparse_csr)(data)
    graph = data.adj_t if args.sparse else data.edge_index
    model = GCN(16)
    optimizer = torch.optim.Adam(
        [
            {"params": model.conv1.parameters(), "weight_decay": 5e-4},
            {"params": model.conv2.parameters(), "weight_decay": 0},
        ],
        lr=0.01,
    )
    for epoch in range(1, args.steps + 1):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, graph)
        loss = (
            F.cross_entropy(out, data.y)
            if args.mistake
            else F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        )
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = model(data.x, graph).argmax(dim=-1) == data.y
        print(f"Epoch: {epoch:03d}, Loss: {loss:.5f}, Test: {correct[~data.train_mask].float().mean():.4f}")


def train_graphs():
    generator = torch.Generator().manual_seed(1)
    graphs = []
    for _ in range(8 * args.steps):
        nodes = int(torch.randint(4, 10, (1,), generator=generator))
        graphs.append(random_graph(nodes, 2 * nodes, generator))
        graphs[-1].y = torch.randint(CLASSES, (1,), generator=generator)
    model = GIN(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for index, data in enumerate(DataLoader(graphs, batch_size=args.batch), 1):
        out = model(data.x, data.edge_index, data.batch, data.num_graphs)
        loss = F.cross_entropy(out, data.y) / args.accumulate
        loss.backward()
        if index % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        print(f"Batch: {index:03d}, Loss: {loss:.5f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    (train_nodes if args.task == "nodes" else train_graphs)()

"""Trains an interatomic potential on e3nn's equivariant layers, with energies and forces, as packages for potentials do.

python train.py [--accumulate 2] [--unit] [--jit script] [--plain] [--two-backwards] [--double] [--evaluate] [--mistake]

Forces are minus the gradient of the energy by the positions, so that the gradient of a loss of forces needs a second derivative.
With --mistake the graph of the energy is retained, but none is created of its gradient: forces are right, but constants, and the
parameters have the gradients of the loss of energies alone.
"""

import argparse
import copy

import e3nn
import torch
from e3nn import o3
from e3nn.math import soft_one_hot_linspace
from e3nn.nn import FullyConnectedNet, Gate
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2, help="Each has three steps.")
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a batch, with a backward each.")
parser.add_argument("--unit", action="store_true", help="Divide edges by their lengths before spherical harmonics.")
parser.add_argument("--jit", choices=["script", "eager"], help="How e3nn runs the code that it writes.")
parser.add_argument("--plain", action="store_true", help="Neither specialized code nor an optimized order of products.")
parser.add_argument("--two-backwards", action="store_true", help="A backward of energies, and one of forces.")
parser.add_argument("--double", action="store_true", help="Train in float64.")
parser.add_argument("--workers", type=int, default=0, help="Processes of the data loader.")
parser.add_argument("--evaluate", action="store_true", help="Evaluate averaged weights after each epoch.")
parser.add_argument("--mistake", action="store_true", help="retain_graph instead of create_graph.")
args = parser.parse_args()

SPECIES, ROWS, BATCH, RADIUS, NEIGHBOURS, BASIS = 3, 24, 8, 2.5, 4.0, 6


class Clusters(Dataset):
    """Random clusters of atoms, and the energies and forces of a pair potential."""

    def __init__(self, number: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(number):
            atoms = int(torch.randint(4, 8, (1,), generator=generator))
            species = torch.randint(SPECIES, (atoms,), generator=generator)
            positions = 1.3 * torch.randn(atoms, 3, generator=generator, dtype=torch.float64)
            positions.requires_grad_()
            radii = 0.8 + 0.2 * species.double()
            i, j = torch.triu_indices(atoms, atoms, 1)
            distance = ((positions[i] - positions[j]) ** 2).sum(1).add(0.05).sqrt()
            energy = ((1 - torch.exp(-(distance - radii[i] - radii[j]))) ** 2 * torch.exp(-0.3 * distance**2)).sum()
            forces = -torch.autograd.grad(energy, positions)[0]
            cluster = [positions.detach(), energy.detach(), forces]
            self.rows.append([species, *(each.to(torch.get_default_dtype()) for each in cluster)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def graph_of(rows: list) -> dict[str, torch.Tensor]:
    """One graph of some clusters."""
    positions = torch.cat([row[1] for row in rows])
    cluster = torch.repeat_interleave(torch.tensor([len(row[0]) for row in rows]))
    distance = (positions[:, None] - positions[None]).norm(dim=-1)
    near = (distance < RADIUS) & (cluster[:, None] == cluster[None]) & (distance > 0)
    return {
        "species": torch.cat([row[0] for row in rows]),
        "positions": positions,
        "cluster": cluster,
        "edges": near.nonzero().T,
        "energies": torch.stack([row[2] for row in rows]),
        "forces": torch.cat([row[3] for row in rows]),
    }


class Convolution(nn.Module):
    """Messages of neighbours: tensor products with weights by the distance."""

    def __init__(self, irreps_in, irreps_edge, irreps_out):
        super().__init__()
        irreps_in, irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        middle, instructions = [], []
        for i, (mul, of_node) in enumerate(irreps_in):
            for j, (_, of_edge) in enumerate(o3.Irreps(irreps_edge)):
                for product in of_node * of_edge:
                    if product in irreps_out:
                        instructions.append((i, j, len(middle), "uvu", True))
                        middle.append((mul, product))
        self.product = o3.TensorProduct(
            irreps_in, irreps_edge, middle, instructions, shared_weights=False, internal_weights=False
        )
        self.radial = FullyConnectedNet([BASIS, 12, self.product.weight_numel], nn.functional.silu)
        self.own = o3.Linear(irreps_in, irreps_out)
        self.out = o3.Linear(self.product.irreps_out, irreps_out)

    def forward(self, nodes, edges, harmonics, lengths):
        source, target = edges
        messages = self.product(nodes[source], harmonics, self.radial(lengths))
        summed = nodes.new_zeros(len(nodes), messages.shape[1]).index_add(0, target, messages)
        return self.own(nodes) + self.out(summed / NEIGHBOURS**0.5)


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        irreps_edge = o3.Irreps.spherical_harmonics(2)
        self.irreps_edge = irreps_edge
        self.species = nn.Embedding(SPECIES, 8)
        self.gate = Gate("8x0e", [torch.nn.functional.silu], "8x0e", [torch.sigmoid], "4x1o + 4x2e")
        self.first = Convolution("8x0e", irreps_edge, self.gate.irreps_in)
        self.second = Convolution(self.gate.irreps_out, irreps_edge, "8x0e")
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(8, 1))

    def forward(self, graph):
        source, target = graph["edges"]
        vectors = graph["positions"][target] - graph["positions"][source]
        lengths = vectors.norm(dim=1)
        if args.unit:
            harmonics = o3.spherical_harmonics(self.irreps_edge, vectors / lengths[:, None], False, "component")
        else:
            harmonics = o3.spherical_harmonics(self.irreps_edge, vectors, True, normalization="component")
        basis = soft_one_hot_linspace(lengths, 0.0, RADIUS, BASIS, basis="smooth_finite", cutoff=True) * BASIS**0.5
        nodes = self.gate(self.first(self.species(graph["species"]), graph["edges"], harmonics, basis))
        energies = self.head(self.second(nodes, graph["edges"], harmonics, basis))[:, 0]
        return energies.new_zeros(len(graph["energies"])).index_add(0, graph["cluster"], energies)


def predict(model: nn.Module, graph: dict, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    graph = graph | {"positions": graph["positions"].clone().requires_grad_()}
    energies = model(graph)
    keep = {"retain_graph": True} if args.mistake else {"create_graph": True}
    forces = -torch.autograd.grad(energies.sum(), graph["positions"], **(keep if training else {}))[0]
    return energies, forces


def main() -> None:
    if args.double:
        torch.set_default_dtype(torch.float64)
    if args.jit:
        e3nn.set_optimization_defaults(jit_mode=args.jit)
    if args.plain:
        e3nn.set_optimization_defaults(specialized_code=False, optimize_einsums=False)
    torch.manual_seed(0)
    model = Potential()
    averaged = copy.deepcopy(model)
    test = graph_of(Clusters(6, 2).rows)
    loader = DataLoader(
        Clusters(ROWS, 1),
        BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
        collate_fn=list,
        num_workers=args.workers,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
    for epoch in range(args.epochs):
        for number, rows in enumerate(loader):
            optimizer.zero_grad()
            atoms, total = sum(len(row[0]) for row in rows), 0.0
            size = len(rows) // args.accumulate
            for start in range(0, len(rows), size):
                graph = graph_of(rows[start : start + size])
                energies, forces = predict(model, graph, training=True)
                of_energies = (energies - graph["energies"]).square().sum() / len(rows)
                of_forces = 10 * (forces - graph["forces"]).square().sum() / (3 * atoms)
                if args.two_backwards:
                    of_energies.backward(retain_graph=True)
                    of_forces.backward()
                else:
                    (of_energies + of_forces).backward()
                total += of_energies.item() + of_forces.item()
            optimizer.step()
            with torch.no_grad():
                for mean, current in zip(averaged.parameters(), model.parameters(), strict=True):
                    mean.lerp_(current, 0.2)
            print(f"epoch {epoch} batch {number} loss {total:.9g}")
        if args.evaluate:
            energies, forces = predict(averaged.eval(), test, training=False)
            error = (forces - test["forces"]).abs().mean().item()
            print(f"errors {(energies - test['energies']).abs().mean().item():.6f} {error:.6f}")


if __name__ == "__main__":
    main()

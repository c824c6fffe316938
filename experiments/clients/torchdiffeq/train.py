"""Trains neural differential equations by torchdiffeq: a model of series with an encoder, and a continuous flow of points.

python train.py [--adjoint] [--times all] [--restart] [--accumulate 2] [--evaluate] [--mistake]
python train.py --task flow [--divergence jacobian] [--double]

The field of the series has a context of each series, which the encoder computes. odeint_adjoint returns gradients of what
adjoint_params lists, by default the parameters of the field, not of other tensors that the field uses. With --mistake
adjoint_params is left out. Solvers have fixed steps, so that a batch may be divided.
"""

import argparse
import itertools

import torch
from torch import nn
from torch.nn import functional
from torchdiffeq import odeint, odeint_adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=["series", "flow"], default="series")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--method", default="rk4", help="A solver with fixed steps.")
parser.add_argument("--adjoint", action="store_true", help="Gradients by the adjoint equation.")
parser.add_argument(
    "--times",
    choices=["observed", "all"],
    default="observed",
    help="The solver has a step size, or all times of its steps.",
)
parser.add_argument("--restart", action="store_true", help="One call of the solver for each interval between times.")
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a batch, with a backward each.")
parser.add_argument(
    "--divergence", choices=["rows", "jacobian"], default="rows", help="By autograd.grad, or torch.func."
)
parser.add_argument("--double", action="store_true", help="Train in float64.")
parser.add_argument("--no-foreach", action="store_true", help="Adam, one parameter at a time.")
parser.add_argument("--evaluate", action="store_true", help="Evaluate by dopri5 after each second step.")
parser.add_argument("--mistake", action="store_true", help="Leave out adjoint_params; needs --adjoint.")
args = parser.parse_args()

SERIES, BATCH, SEEN, WIDTH, CONTEXT = 48, 16, 5, 4, 3
STEP = 0.125
DTYPE = torch.float64 if args.double else torch.float32


class Encoder(nn.Module):
    """The initial state and the context of a series, from its first values."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SEEN, 16), nn.Tanh())
        self.start = nn.Linear(16, WIDTH)
        self.context = nn.Linear(16, CONTEXT)

    def forward(self, seen):
        features = self.trunk(seen)
        return self.start(features), self.context(features)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.context = None
        self.net = nn.Sequential(nn.Linear(WIDTH + CONTEXT, 20), nn.Tanh(), nn.Linear(20, WIDTH))

    def forward(self, t, y):
        return 3.0 * self.net(torch.cat([y, self.context], -1))


class SeriesModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.field, self.decoder = Encoder(), Field(), nn.Linear(WIDTH, 1)

    def solve(self, y, times, solver):
        if solver is not None:
            return odeint(self.field, y, times, method=solver, rtol=1e-5, atol=1e-6)
        if args.adjoint:
            listed = {} if args.mistake else {"adjoint_params": (*self.field.parameters(), self.field.context)}
            return odeint_adjoint(self.field, y, times, method=args.method, options={"step_size": STEP}, **listed)
        if args.times == "all":
            number = round((times[-1] - times[0]).item() / STEP) + 1
            dense = torch.linspace(times[0].item(), times[-1].item(), number, dtype=times.dtype)
            every = (number - 1) // (len(times) - 1)
            return odeint(self.field, y, dense, method=args.method)[::every]
        return odeint(self.field, y, times, method=args.method, options={"step_size": STEP})

    def forward(self, seen, times, solver=None):
        start, self.field.context = self.encoder(seen)
        if args.restart and solver is None:
            states = [start]
            for begin, end in itertools.pairwise(times):
                states.append(self.solve(states[-1], torch.stack([begin, end]), solver)[-1])
            states = torch.stack(states)
        else:
            states = self.solve(start, times, solver)
        return self.decoder(states)[..., 0].T


class Flow(nn.Module):
    """The velocity of points in the plane, and the change of their log density."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))

    def velocity(self, t, points):
        return self.net(torch.cat([points, t.expand(*points.shape[:-1], 1)], -1))

    def forward(self, t, state):
        points = state[0]
        if args.divergence == "jacobian":
            jacobians = torch.func.vmap(torch.func.jacrev(lambda point: self.velocity(t, point)))(points)
            return self.velocity(t, points), -jacobians.diagonal(dim1=1, dim2=2).sum(1)
        with torch.enable_grad():
            if not points.requires_grad:
                points = points.requires_grad_()
            velocity = self.velocity(t, points)
            trace = 0.0
            for axis in range(2):
                rows = torch.autograd.grad(velocity[:, axis].sum(), points, create_graph=True)[0]
                trace = trace + rows[:, axis]
        return velocity, -trace


def series(seed: int, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first values of damped oscillations, and those at some times."""
    generator = torch.Generator().manual_seed(seed)
    frequency = 3 + 3 * torch.rand(SERIES, 1, generator=generator)
    damping = torch.rand(SERIES, 1, generator=generator)
    phase = 6.28 * torch.rand(SERIES, 1, generator=generator)

    def values(t):
        return torch.exp(-damping * t) * torch.sin(frequency * t + phase)

    seen = values(torch.linspace(-0.5, 0, SEEN)) + 0.02 * torch.randn(SERIES, SEEN, generator=generator)
    return seen.to(DTYPE), values(times.float()).to(DTYPE)


def moons(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    angle = 3.14 * torch.rand(SERIES, generator=generator)
    side = torch.arange(SERIES) % 2
    points = torch.stack([torch.cos(angle) + side - 0.5, (1 - 2 * side) * torch.sin(angle) + 0.4 * side], 1)
    return (points + 0.1 * torch.randn(SERIES, 2, generator=generator)).to(DTYPE)


def flow_loss(flow: Flow, points: torch.Tensor) -> torch.Tensor:
    """Minus the mean log density of points that the flow carries to a normal distribution."""
    times = torch.tensor([1.0, 0.0], dtype=DTYPE)
    zeros = torch.zeros(len(points), dtype=DTYPE)
    ends, changes = odeint(flow, (points, zeros), times, method=args.method, options={"step_size": STEP})
    density = -0.5 * (ends[-1] ** 2).sum(1) - 1.8378770664
    return -(density - changes[-1]).mean()


def main() -> None:
    torch.manual_seed(0)
    times = torch.linspace(0, 1.5, 4, dtype=DTYPE)
    model = SeriesModel() if args.task == "series" else Flow()
    model = model.to(DTYPE)
    data = series(1, times) if args.task == "series" else (moons(1),)
    test = series(2, times)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False if args.no_foreach else None)
    generator = torch.Generator().manual_seed(3)
    for step in range(args.steps):
        rows = torch.randperm(SERIES, generator=generator)[:BATCH]
        optimizer.zero_grad()
        total = 0.0
        for part in rows.chunk(args.accumulate):
            if args.task == "series":
                seen, target = data[0][part], data[1][part]
                loss = functional.mse_loss(model(seen, times), target) / args.accumulate
            else:
                loss = flow_loss(model, data[0][part]) / args.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        print(f"step {step} loss {total:.9g}")
        if args.evaluate and step % 2:
            model.eval()
            with torch.no_grad():
                error = functional.mse_loss(model(test[0], times, solver="dopri5"), test[1]).item()
            model.train()
            print(f"test error {error:.6f}")


if __name__ == "__main__":
    main()

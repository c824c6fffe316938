"""Trains Gaussian processes of GPyTorch as its tutorials do: a sparse one with a deep kernel on minibatches, and an exact one.

python train.py [--task exact] [--evaluate] [--two-optimizers] [--natural] [--accumulate 2] [--no-foreach] [--dense] [--own-loss]
    [--mistake]

Both evaluate after each epoch. With --mistake the sparse model is not put back into training mode afterwards: in evaluation mode
GPyTorch keeps the variational distribution and the factor of the inducing points' kernel, here without a graph. The variational
covariance has no gradient then, and inducing points and lengthscales lack a part of theirs.
"""

import argparse

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.priors import GammaPrior
from gpytorch.variational import CholeskyVariationalDistribution, NaturalVariationalDistribution, VariationalStrategy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=["sparse", "exact"], default="sparse")
parser.add_argument("--evaluate", action="store_true", help="Exact: predict in between. The sparse task always does.")
parser.add_argument("--no-evaluate", action="store_true", help="Sparse: predict nothing.")
parser.add_argument(
    "--two-optimizers", action="store_true", help="One Adam for the variational parameters, one for all others."
)
parser.add_argument("--natural", action="store_true", help="Natural gradients for the variational parameters.")
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a minibatch, with a backward each.")
parser.add_argument("--no-foreach", action="store_true", help="Adam takes one parameter at a time.")
parser.add_argument("--dense", action="store_true", help="Compute kernels at once, and no linear algebra but Cholesky.")
parser.add_argument("--own-loss", action="store_true", help="Exact: the density of torch.distributions.")
parser.add_argument("--mistake", action="store_true", help="Do not call train() after an evaluation.")
args = parser.parse_args()

ROWS, BATCH, EPOCHS, STEPS, INDUCING = 64, 16, 2, 9, 8


def rows(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(number, 3, generator=generator) * 4 - 2
    noise = 0.2 * torch.randn(number, generator=generator)
    return x, torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + noise


class SparseLayer(gpytorch.models.ApproximateGP):
    def __init__(self, inducing: torch.Tensor):
        kind = NaturalVariationalDistribution if args.natural else CholeskyVariationalDistribution
        super().__init__(VariationalStrategy(self, inducing, kind(len(inducing)), learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=inducing.shape[1]))
        self.covar_module.base_kernel.lengthscale = 0.3

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class DeepKernel(gpytorch.Module):
    """Features of a small net, and a sparse Gaussian process of them."""

    def __init__(self, x: torch.Tensor):
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        with torch.no_grad():
            inducing = self.features(x[:INDUCING])
        self.layer = SparseLayer(inducing)

    def forward(self, x):
        return self.layer(self.features(x))


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: GaussianLikelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.LinearMean(3)
        lengths = GammaPrior(3.0, 6.0)
        self.covar_module = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=3, lengthscale_prior=lengths))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def optimizers_of(model: DeepKernel, likelihood: GaussianLikelihood) -> list[torch.optim.Optimizer]:
    foreach = False if args.no_foreach else None
    variational = list(model.layer.variational_parameters())
    others = [
        {"params": model.features.parameters(), "lr": 5e-3},
        {"params": model.layer.hyperparameters()},
        {"params": likelihood.parameters()},
    ]
    if args.natural:
        natural = gpytorch.optim.NGD(variational, num_data=ROWS, lr=0.1)
        return [natural, torch.optim.Adam(others, lr=0.02, foreach=foreach)]
    if args.two_optimizers:
        kinds = [variational, others]
        return [torch.optim.Adam(each, lr=0.02, foreach=foreach) for each in kinds]
    return [torch.optim.Adam([{"params": variational}, *others], lr=0.02, foreach=foreach)]


def evaluate(model, likelihood, x, y) -> float:
    model.eval()
    likelihood.eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        return (likelihood(model(x)).mean - y).abs().mean().item()


def train_sparse() -> None:
    x, y = rows(ROWS, 1)
    model, likelihood = DeepKernel(x), GaussianLikelihood()
    optimizers = optimizers_of(model, likelihood)
    elbo = VariationalELBO(likelihood, model.layer, num_data=ROWS)
    generator = torch.Generator().manual_seed(2)
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True, generator=generator)
    for epoch in range(EPOCHS):
        if epoch == 0 or not args.mistake:
            model.train()
            likelihood.train()
        for number, (inputs, targets) in enumerate(loader):
            for optimizer in optimizers:
                optimizer.zero_grad()
            total = 0.0
            for part, wanted in zip(inputs.chunk(args.accumulate), targets.chunk(args.accumulate), strict=True):
                loss = -elbo(model(part), wanted) / args.accumulate
                loss.backward()
                total += loss.item()
            for optimizer in optimizers:
                optimizer.step()
            print(f"epoch {epoch} batch {number} loss {total:.9g} noise {likelihood.noise.item():.6g}")
        if not args.no_evaluate:
            print(f"epoch {epoch} error {evaluate(model, likelihood, *rows(16, 3)):.6f}")


def train_exact() -> None:
    x, y = rows(ROWS, 1)
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-3))
    model = Exact(x, y, likelihood)
    model.covar_module.base_kernel.lengthscale = 0.8
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False if args.no_foreach else None)
    mll = ExactMarginalLogLikelihood(likelihood, model)
    for step in range(STEPS):
        model.train()
        likelihood.train()
        optimizer.zero_grad()
        if args.own_loss:
            predicted = likelihood(model(x))
            density = torch.distributions.MultivariateNormal(predicted.mean, predicted.covariance_matrix)
            priors = sum(prior.log_prob(of(module)).sum() for _, module, prior, of, _ in model.named_priors())
            loss = -(density.log_prob(y) + priors) / ROWS
        else:
            loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9g} noise {likelihood.noise.item():.6g}")
        if args.evaluate and step % 3 == 2:
            print(f"step {step} error {evaluate(model, likelihood, *rows(16, 3)):.6f}")


def main() -> None:
    torch.manual_seed(0)
    exact = args.dense
    with (
        gpytorch.settings.lazily_evaluate_kernels(not exact),
        gpytorch.settings.fast_computations(covar_root_decomposition=not exact, log_prob=not exact, solves=not exact),
    ):
        train_exact() if args.task == "exact" else train_sparse()


if __name__ == "__main__":
    main()

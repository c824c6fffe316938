"""Trains embeddings of a knowledge graph by pykeen: its training loops, a loop of our own, sub-batches, slices, checkpoints.

python train.py [--model rotate] [--slice 5] [--sub-batch 4] [--evaluate] [--resume] [--workers 1] [--fused]
python train.py --loop own [--mistake]

DistMult collects a regularization term in forward, which pykeen's loops add to the loss. With --mistake the own loop does not.
"""

import argparse
import os
import tempfile
import warnings

os.environ["PYSTOW_HOME"] = tempfile.mkdtemp(prefix="pykeen-")  # pykeen's folder of data and checkpoints

import numpy
import torch
from pykeen.evaluation import RankBasedEvaluator
from pykeen.models import DistMult, RotatE
from pykeen.training import LCWATrainingLoop
from pykeen.training.callbacks import EvaluationTrainingCallback, TrainingCallback
from pykeen.triples import CoreTriplesFactory
from pykeen.triples.instances import LCWAInstances
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument(
    "--model",
    choices=["distmult", "rotate"],
    default="distmult",
    help="rotate has complex numbers and no regularization.",
)
parser.add_argument("--epochs", type=int, default=2, help="Each has three steps.")
parser.add_argument("--loop", choices=["pykeen", "own"], default="pykeen")
parser.add_argument("--sub-batch", type=int, help="Pairs of a backward.")
parser.add_argument("--slice", type=int, help="Tails that are scored at once.")
parser.add_argument("--evaluate", action="store_true", help="Rank the tails and heads of a test set after each epoch.")
parser.add_argument("--resume", action="store_true", help="Go on from a checkpoint after the first epoch.")
parser.add_argument("--workers", type=int, default=0, help="Processes of the data loader.")
parser.add_argument("--fused", action="store_true", help="The fused Adam.")
parser.add_argument("--mistake", action="store_true", help="Leave out the regularization; needs --loop own.")
args = parser.parse_args()

ENTITIES, RELATIONS, TRIPLES, BATCH = 20, 3, 70, 16


def graph(number: int, seed: int) -> CoreTriplesFactory:
    """Entities on a ring; a relation goes some places further."""
    random = numpy.random.default_rng(seed)
    heads, relations = random.integers(ENTITIES, size=number), random.integers(RELATIONS, size=number)
    tails = (heads + 2 * relations + 1 + random.integers(3, size=number)) % ENTITIES
    triples = numpy.unique(numpy.stack([heads, relations, tails], 1), axis=0)
    return CoreTriplesFactory(torch.from_numpy(triples), num_entities=ENTITIES, num_relations=RELATIONS)


class Printing(TrainingCallback):
    def __init__(self):
        super().__init__()
        self.total = 0.0

    def on_batch(self, epoch, batch, batch_loss, **kwargs):
        self.total += batch_loss

    def pre_step(self, **kwargs):
        print(f"loss {self.total:.9g}")
        self.total = 0.0


def new_model(factory: CoreTriplesFactory):
    common = {"triples_factory": factory, "random_seed": 0, "loss": "bcewithlogits"}
    if args.model == "rotate":
        return RotatE(embedding_dim=8, **common)
    return DistMult(embedding_dim=12, regularizer_kwargs={"weight": 0.5, "p": 2.0, "normalize": True}, **common)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.02, fused=args.fused or None)


def new_loop(model, factory: CoreTriplesFactory) -> LCWATrainingLoop:
    """A training loop that does not search for a size of sub-batches, which draws random numbers."""
    return LCWATrainingLoop(
        model=model, triples_factory=factory, optimizer=adam(model), automatic_memory_optimization=False
    )


def train_own(model, factory: CoreTriplesFactory) -> None:
    model.reset_parameters_()  # as the loops of pykeen do at their beginning
    optimizer = adam(model)
    loader = DataLoader(LCWAInstances.from_triples_factory(factory), BATCH, shuffle=True)
    for _ in range(args.epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            scores = model.score_t(batch["pairs"])
            loss = model.loss(scores, batch["target"])
            if not args.mistake:
                loss = loss + model.collect_regularization_term()
            print(f"loss {loss.item():.9g}")
            loss.backward()
            optimizer.step()
            model.post_parameter_update()


def train(model, factory: CoreTriplesFactory, test: CoreTriplesFactory, folder: str) -> None:
    options = {
        "triples_factory": factory,
        "batch_size": BATCH,
        "sub_batch_size": args.sub_batch,
        "slice_size": args.slice,
        "num_workers": args.workers,
        "use_tqdm": False,
        "use_tqdm_batch": False,
        "callbacks": [Printing()],
        "pin_memory": False,
    }
    if args.evaluate:
        evaluation = EvaluationTrainingCallback(
            evaluation_triples=test.mapped_triples, evaluator=RankBasedEvaluator(), batch_size=8, use_tqdm=False
        )
        options["callbacks"].append(evaluation)
    if args.resume:
        options |= {"checkpoint_directory": folder, "checkpoint_name": "last.pt", "checkpoint_frequency": 0}
        new_loop(model, factory).train(num_epochs=1, **options)
        model = new_model(factory)
        options["callbacks"] = [Printing()]
    new_loop(model, factory).train(num_epochs=args.epochs, **options)


def main() -> None:
    warnings.filterwarnings("ignore")
    factory, test = graph(TRIPLES, 1), graph(20, 2)
    model = new_model(factory)
    torch.manual_seed(1)
    if args.loop == "own":
        train_own(model, factory)
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(model, factory, test, folder)


if __name__ == "__main__":
    main()
